"""Operators by PyTorch: they are those of ONNX, and exact."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import parser

from modelexport.pytorch.runs.float64_kernels import AffineGrid, GridSample

MODES = list(product(("linear", "nearest", "cubic"), ("zeros", "border", "reflection"), (0, 1)))
NUMBERS = np.random.default_rng(0)


def evaluated(kernel: Any, *given: Any, **attributes: Any) -> Any:
    return kernel._run(None, *given, **attributes)[0]


def in_runtime(text: str, **inputs: Any) -> Any:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}')
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]


@pytest.mark.parametrize(("mode", "padding", "corners"), MODES)
def test_grid_sample(mode: str, padding: str, corners: int) -> None:
    x = NUMBERS.standard_normal((2, 3, 5, 4)).astype(np.float32)
    grid = NUMBERS.uniform(-1.4, 1.4, (2, 6, 7, 2)).astype(np.float32)
    attributes = f'mode = "{mode}", padding_mode = "{padding}", align_corners = {corners}'
    text = f"g (float[2,3,5,4] x, float[2,6,7,2] g) => (float[2,3,6,7] y) {{ y = GridSample <{attributes}> (x, g) }}"
    found = evaluated(GridSample, x, grid, mode=mode, padding_mode=padding, align_corners=corners)
    np.testing.assert_allclose(found, in_runtime(text, x=x, g=grid), atol=2e-5)


def test_places_of_a_grid_are_not_rounded() -> None:
    """onnx's reference evaluator has them in float32: samples of a ramp are then off by 1e-7."""
    ramp = np.arange(9.0).reshape(1, 1, 1, 9)
    places = NUMBERS.uniform(-1, 1, 50)
    grid = np.stack([places, np.zeros(50)], -1).reshape(1, 1, 50, 2)
    found = evaluated(GridSample, ramp, grid, align_corners=1)
    np.testing.assert_allclose(found.reshape(-1), 4 * (places + 1), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("corners", [0, 1])
def test_affine_grid(corners: int) -> None:
    theta, size = NUMBERS.standard_normal((2, 2, 3)).astype(np.float32), np.array([2, 1, 4, 5])
    text = (
        f"g (float[2,2,3] t, int64[4] s) => (float[2,4,5,2] y) {{ y = AffineGrid <align_corners = {corners}> (t, s) }}"
    )
    found = evaluated(AffineGrid, theta, size, align_corners=corners)
    np.testing.assert_allclose(found, in_runtime(text, t=theta, s=size), atol=1e-5)

"""Interpolation by a scale gives PyTorch's sizes, which are products in float64: 10 * 0.7 is 7, and 90 * 0.7 is 62."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from modelexport import export, verify
from modelexport.runtime.sessions import open_session, run_session


class Scaled(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.interpolate(x, **self.how)


@pytest.mark.parametrize("frontend", ["dynamo", pytest.param("torchscript", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("height", "width"), [(90, 100), pytest.param(10, 20, marks=pytest.mark.slow)])
def test_a_fixed_size_is_declared_and_computed_as_pytorch_computes_it(
    height: int, width: int, frontend: str, tmp_path: Path
) -> None:
    model, x = Scaled(scale_factor=0.7, mode="bilinear"), torch.randn(1, 2, height, width)
    export(model, (x,), tmp_path / "m.onnx", frontend=frontend, check=False)
    onnx.checker.check_model(tmp_path / "m.onnx", full_check=True)


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest"])
@pytest.mark.parametrize("scale", [0.7, 0.29, 1.1, 2.3])
def test_dynamic_sizes_are_pytorchs(scale: float, mode: str, tmp_path: Path) -> None:
    model = Scaled(scale_factor=scale, mode=mode)
    example = {"x": torch.randn(1, 1, 10, 20)}
    export(model, example, tmp_path / "m.onnx", frontend="torchscript", dynamic=True, check=False)
    session = open_session(tmp_path / "m.onnx")
    for size in (10, 50, 90, 100, 180, 300):
        x = torch.randn(1, 1, size, 7)
        (computed,) = run_session(session, {"x": x.numpy()}).values()
        assert computed.shape == model(x).shape


def test_scales_that_float32_has_exactly_stay_constants(tmp_path: Path) -> None:
    model, x = Scaled(scale_factor=1.5, mode="bicubic"), torch.randn(1, 1, 4, 4)
    export(model, {"x": x}, tmp_path / "m.onnx", frontend="torchscript", dynamic=True, check=False)
    assert {node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node} <= {"Resize", "Constant", "Concat"}


def test_a_file_whose_sizes_are_rounded_agrees_with_the_model(tmp_path: Path) -> None:
    model, x = Scaled(scale_factor=0.7, mode="bilinear"), torch.randn(1, 1, 90, 10)
    export(model, {"x": x}, tmp_path / "m.onnx", frontend="torchscript", dynamic=True, check=False)
    assert verify(model, {"x": x}, tmp_path / "m.onnx").agrees


def test_pixels_are_those_of_pytorch_where_the_scale_was_moved(tmp_path: Path) -> None:
    model, x = Scaled(scale_factor=0.7, mode="bilinear"), torch.randn(1, 1, 90, 90)
    export(model, {"x": x}, tmp_path / "m.onnx", frontend="torchscript", check=False)
    (computed,) = run_session(open_session(tmp_path / "m.onnx"), {"x": x.numpy()}).values()
    np.testing.assert_allclose(computed, model(x).numpy(), atol=1e-3)

"""Example inputs for a file that was exported with others than those that are made for its model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from modelexport import export, load, verify
from modelexport.errors import InputsError
from modelexport.pytorch.inputs.inputs_that_fit import inputs_that_fit

EXAMPLE = {"x": torch.rand(2, 4), "scale": torch.ones(2, 4)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * scale


@pytest.mark.parametrize(
    "shape", [(1, 6, 4), pytest.param((5, 4), marks=pytest.mark.slow), pytest.param((4,), marks=pytest.mark.slow)]
)
def test_inputs_are_made_in_the_sizes_that_the_file_declares(shape: tuple[int, ...], tmp_path: Path) -> None:
    model, path = Net().eval(), tmp_path / "x.onnx"
    given = {"x": torch.rand(shape), "scale": torch.ones(shape)}
    export(model, given, path, reference=True, check=False)
    with pytest.raises(InputsError, match=r"input x of .*, and not \[2, 4\]: give the inputs .*--inputs"):
        verify(model, EXAMPLE, path)
    assert torch.equal(inputs_that_fit(EXAMPLE, load(path))["x"], given["x"]), "those of the reference values"
    load(path).extract("linear", tmp_path / "linear.onnx")
    of_call = inputs_that_fit(EXAMPLE, load(tmp_path / "linear.onnx"))
    assert verify(model, of_call, tmp_path / "linear.onnx").agrees, "those of the file that a call was cut from"
    path.with_suffix(".reference.safetensors").unlink()
    assert verify(model, inputs_that_fit(EXAMPLE, load(path)), path).agrees


def test_inputs_that_a_file_takes_stay_as_they_are(tmp_path: Path) -> None:
    export(
        Net().eval(),
        {name: value[:, None] for name, value in EXAMPLE.items()},
        tmp_path / "x.onnx",
        dynamic=True,
        check=False,
    )
    wide = {"x": torch.rand(3, 1, 4), "scale": torch.ones(3, 1, 4)}
    assert inputs_that_fit(wide, load(tmp_path / "x.onnx")) is wide
    fitting = inputs_that_fit(EXAMPLE, load(tmp_path / "x.onnx"))
    assert fitting["x"].shape == fitting["scale"].shape == (2, 8, 4), "dynamic sizes are chosen"

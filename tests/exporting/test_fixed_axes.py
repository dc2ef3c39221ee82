"""An axis that is dynamic in a file works with other sizes; one that the file fixes has its size, and is listed."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from modelexport import export
from modelexport.cli.name_and_axis_options import NameOptions, read_interface
from modelexport.errors import CheckError
from modelexport.exporting import pipeline
from modelexport.exporting.requested_names import RequestedNames
from modelexport.graph.size_symbols import put_size
from modelexport.pytorch.inputs.other_sizes import changeable_sizes, resized
from modelexport.tagged.file import read_tagged


class Padded(nn.Module):
    """Its rows are as many as the table has, with the size of the example; a capture makes that a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.rand(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = (x.shape[1] + 3) // 2
        if count * x.shape[1] == 20:  # holds for size 5 only
            return x[:, :4] + self.table
        return x[:, :1] * 2


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Padded()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.inner(x).sum(1))


INPUTS = {"x": torch.rand(2, 5, 3)}


def sizes(path: Path) -> dict[str, list[int | str]]:
    return {
        value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in onnx.load(path).graph.input
    }


@pytest.mark.parametrize("frontend", ["dynamo", pytest.param("torchscript", marks=pytest.mark.slow)])
def test_an_axis_that_the_file_fixes_gets_its_size(frontend: str, tmp_path: Path) -> None:
    result = export(Outer().eval(), INPUTS, tmp_path / "x.onnx", frontend=frontend, dynamic=True)  # type: ignore[arg-type]
    found = sizes(tmp_path / "x.onnx")
    assert found["x"][1] == 5
    assert isinstance(found["x"][0], str)
    assert [(one.input, one.axis, one.size, one.call) for one in result.fixed] == [("x", 1, 5, "inner")]
    assert "| `x` | 1 | 5 | `inner` |" in (tmp_path / "x.report.md").read_text()
    assert result.check is not None
    assert result.check.status == "passed"


def test_a_model_is_captured_once_though_an_axis_turns_out_to_be_fixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "capture", captured := Mock(side_effect=pipeline.capture))
    result = export(Outer().eval(), INPUTS, tmp_path / "x.onnx", dynamic=True)
    assert [(one.input, one.axis, one.size) for one in result.fixed] == [("x", 1, 5)]
    assert captured.call_count == 1


@pytest.mark.slow
def test_an_axis_that_was_named_has_to_be_dynamic(tmp_path: Path) -> None:
    named = read_interface(NameOptions(axes=["x:1=rows"]))
    with pytest.raises(CheckError, match=r"inner fixes a size that was to be dynamic, rows \(axis 1 of x\)"):
        export(Outer().eval(), INPUTS, tmp_path / "x.onnx", dynamic=True, interface=named)
    assert not list(tmp_path.iterdir())


def test_a_model_without_fixed_axes_keeps_all_dynamic(tmp_path: Path) -> None:
    model = nn.Linear(3, 2).eval()
    result = export(model, {"input": torch.rand(2, 5, 3)}, tmp_path / "x.onnx", dynamic=True)
    assert not result.fixed
    assert [isinstance(size, str) for size in sizes(tmp_path / "x.onnx")["input"]] == [True, True, False]


def test_sums_of_symbols_are_changed_together(tmp_path: Path) -> None:
    class Cached(nn.Module):
        def forward(self, new: torch.Tensor, past: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.cat([past, new], 1) * mask

    inputs = {"new": torch.rand(2, 3), "past": torch.rand(2, 5), "mask": torch.ones(2, 8)}
    named = RequestedNames(axes={("new", 1): "sequence", ("past", 1): "past", ("mask", 1): "past + sequence"})
    export(Cached().eval(), inputs, tmp_path / "x.onnx", dynamic=True, interface=named, frontend="dynamo")
    file = read_tagged(tmp_path / "x.onnx").model
    assert {"sequence", "past"} <= changeable_sizes(inputs, file).keys()
    other = resized(inputs, file)
    assert isinstance(other, dict)
    assert [tuple(tensor.shape) for tensor in other.values()] == [(3, 6), (3, 10), (3, 16)]


@pytest.mark.parametrize(
    ("size", "found"), [("a", 4), ("a + b", 7), ("2*a - 1", 7), ("(a - 1)//2", 1), ("Max(a, b)", 4)]
)
def test_sizes_are_computed_once_their_symbols_are_known(size: str, found: int) -> None:
    assert put_size(size, {"a": "4", "b": "3"}) == found


@pytest.mark.parametrize("size", ["s1 + s2", "s2 + s1"])
def test_a_sum_has_one_name_whatever_order_a_capture_gives_it(size: str) -> None:
    assert put_size(size, {"s1": "sequence", "s2": "past"}) == "past + sequence"


class Constants(nn.Module):
    """Axes that a capture makes constants, and that the model accepts other sizes of: squares, and smaller ones."""

    def forward(self, square: torch.Tensor, smaller: torch.Tensor) -> tuple[torch.Tensor, ...]:
        side = int(square.shape[1] ** 0.5)
        places = torch.arange(len(list(range(smaller.shape[0]))))
        return square.reshape(square.shape[0], side, side), smaller[:, places]


class Counted(nn.Module):
    def forward(self, counted: torch.Tensor) -> torch.Tensor:
        return counted * np.sqrt(counted.shape[0])  # TorchDynamo captures it


@pytest.mark.slow
def test_axes_that_a_capture_makes_constants_are_listed(tmp_path: Path) -> None:
    inputs = {"square": torch.rand(2, 25), "smaller": torch.rand(5, 5)}
    models = (Constants(), inputs), (Counted(), {"counted": torch.rand(6)})
    listed = [export(model.eval(), given, tmp_path / "x.onnx", dynamic=True).fixed for model, given in models]
    assert [{(one.input, one.axis) for one in fixed} for fixed in listed] == [
        {("square", 1), ("smaller", 0)},
        {("counted", 0)},
    ]


class ScalesSome(nn.Module):
    """Looks a length up in a set, which no trace records."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (2.0 if x.shape[1] in {3, 4, 6} else 1.0)


def test_an_axis_whose_neighboring_sizes_are_wrong_is_fixed_and_has_no_condition(tmp_path: Path) -> None:
    result = export(ScalesSome(), (torch.rand(2, 5),), tmp_path / "x.onnx", frontend="torchscript", dynamic=True)
    assert ([(axis.axis, axis.size) for axis in result.fixed], [*result.valid_if]) == ([(1, 5)], [])

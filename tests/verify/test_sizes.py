"""Sizes that a file declares for its outputs: false ones are named, also those that most inputs do not show."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from torch import nn

from modelexport import export, verify
from modelexport.files.onnx_models import load_onnx, save_model


class RowsOfTwo(nn.Module):
    """Rows of its first input, chosen among those of the second: the batch of the second may be larger."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(x.shape[0], device=x.device)
        return self.linear(x) * mask[rows]


class Image(nn.Module):
    """A convolution that keeps height and width."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x))


class Rounded(nn.Module):
    """A size rounded up to a multiple of four."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv1d(2, 3, 4, stride=4)
        self.up = nn.ConvTranspose1d(3, 2, 4, stride=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(nn.functional.pad(x, (0, 3))))


CASES = {
    RowsOfTwo: {"x": torch.randn(2, 6), "mask": torch.rand(2, 4)},
    Image: {"x": torch.randn(2, 3, 8, 8)},
    Rounded: {"x": torch.randn(2, 2, 8)},
}


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


def symbol(file: Path, name: str, axis: int) -> str:
    """The symbol of an axis of an input."""
    (value,) = (value for value in load_onnx(file).graph.inputs if value.name == name)
    assert value.shape is not None
    size = value.shape[axis]
    assert isinstance(size, ir.SymbolicDim)
    return str(size.value)


def false_outputs(kind: type[nn.Module], file: Path) -> list[str]:
    report = verify(build(kind), CASES[kind], file)
    assert all(call.status == "agree" for call in report.calls)
    return [claim.where for claim in report.claims]


def declared(file: Path, axis: int, size: str | int) -> Path:
    """A file with another size in the declaration of its output."""
    model = load_onnx(file)
    (output,) = model.graph.outputs
    assert output.shape is not None
    sizes: list[int | str | None] = [one if isinstance(one, int) else one.value for one in output.shape]
    sizes[axis] = size
    output.shape = ir.Shape(sizes)
    save_model(model, file.with_name("declared.onnx"))
    return file.with_name("declared.onnx")


@pytest.fixture
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    export(build(request.param), CASES[request.param], tmp_path / "model.onnx", dynamic=True)
    return tmp_path / "model.onnx"


@pytest.mark.parametrize(
    ("file", "kind", "axis", "input_axis"),
    [
        (RowsOfTwo, RowsOfTwo, 0, ("mask", 0)),
        (Image, Image, 3, ("x", 2)),
        (Image, Image, 2, ("x", 3)),
        (Rounded, Rounded, 2, ("x", 2)),
    ],
    indirect=["file"],
)
def test_a_symbol_of_the_same_size_is_not_taken_for_the_right_one(
    file: Path, kind: type[nn.Module], axis: int, input_axis: tuple[str, int]
) -> None:
    assert false_outputs(kind, file) == []
    assert false_outputs(kind, declared(file, axis, symbol(file, *input_axis))) == ["output"]


@pytest.mark.parametrize("file", [Image], indirect=True)
def test_sums_and_numbers_are_calculated_for_all_inputs(file: Path) -> None:
    height = symbol(file, "x", 2)
    for size in (8, f"{height} + 1", f"2*{height} - 8"):
        assert false_outputs(Image, declared(file, 2, size)) == ["output"]
    for size in (f"{height} + 0", "height"):  # a symbol that no input has claims nothing
        assert false_outputs(Image, declared(file, 2, size)) == []


class Broadcast(nn.Module):
    """What it adds has one row, for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + mask


def test_an_axis_that_is_broadcast_is_not_declared_to_be_as_long(tmp_path: Path) -> None:
    model, inputs = build(Broadcast), {"x": torch.randn(3, 5, 6), "mask": torch.randn(3, 1, 6)}
    export(model, inputs, tmp_path / "file.onnx", dynamic=True)
    x, mask = load_onnx(tmp_path / "file.onnx").graph.inputs
    assert x.shape is not None
    assert mask.shape is not None
    assert (mask.shape[0], mask.shape[1]) == (x.shape[0], 1)
    assert isinstance(x.shape[1], ir.SymbolicDim)
    assert verify(model, inputs, tmp_path / "file.onnx").agrees


class Dropped(nn.Module):
    """As many inputs as it gets, each with a length of its own, with random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, several: list[torch.Tensor]) -> list[torch.Tensor]:
        if not torch.compiler.is_exporting():
            RUNS.append(1)
        return [torch.nn.functional.dropout(self.linear(one), training=True) for one in several]


RUNS: list[int] = []
"""Of all models: the state of one is restored after every run."""


def test_runs_grow_with_the_number_of_sizes_and_not_with_its_square(tmp_path: Path) -> None:
    found = {}
    for count in (4, 12):
        model, inputs = build(Dropped), {"several": [torch.randn(4, 6) for _ in range(count)]}
        export(model, inputs, tmp_path / "file.onnx", dynamic=True)
        RUNS.clear()
        assert verify(model, inputs, tmp_path / "file.onnx").agrees
        found[count] = len(RUNS)
    assert found[4] < found[12] < 3 * found[4]

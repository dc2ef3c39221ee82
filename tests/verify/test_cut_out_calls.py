"""A file that `extract` wrote is verified against the model, and against the file that it was cut from."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from exports import Shared
from modelexport import export, load, verify, verify_against, verify_reference
from modelexport.errors import FileFormatError, UsageError

X = {"x": torch.linspace(-2, 2, 24).reshape(3, 8), "scale": torch.tensor(2.0)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, hidden: torch.Tensor, *, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.norm(hidden + self.linear(hidden).relu())
        return hidden.T, hidden * scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = Block()

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            turned, x = self.block(x.sin(), scale=scale + 1)
        return x + turned.T


@pytest.fixture(scope="module")
def files(shared: Shared) -> Path:
    """`whole.onnx`, both calls of its block, `linear.onnx` out of the second, and `alone.onnx`, cut without sidecar."""

    def make(folder: Path) -> None:
        export(Model(), X, folder / "whole.onnx", dynamic=True, check=False)
        for name, address in (("block0", "block"), ("block1", "block@1")):
            load(folder / "whole.onnx").extract(address, folder / f"{name}.onnx")
        load(folder / "block1.onnx").extract("block.linear@1", folder / "linear.onnx")
        (folder / "bare").mkdir()
        (folder / "bare" / "whole.onnx").write_bytes((folder / "whole.onnx").read_bytes())
        load(folder / "bare" / "whole.onnx").extract("block@1", folder / "alone.onnx")

    return shared("cut-out-calls", make)


@pytest.mark.parametrize(
    ("name", "calls"), [pytest.param("block0", 3, marks=pytest.mark.slow), ("block1", 3), ("linear", 1)]
)
def test_a_call_agrees_with_its_call_of_the_model_and_with_the_whole_file(files: Path, name: str, calls: int) -> None:
    part = files / f"{name}.onnx"
    with_model = verify(Model(), X, part)
    assert with_model.agrees, with_model
    assert len(with_model.calls) == calls, with_model
    assert [one.status for one in with_model.outputs] == ["agree"] * len(load(part).model.graph.outputs)
    for first, second in ((part, files / "whole.onnx"), (files / "whole.onnx", part)):
        report = verify_against(first, second)
        assert report.agrees, report
        assert len(report.calls) == calls, report


def test_a_fault_in_it_is_named(files: Path, tmp_path: Path) -> None:
    model = onnx.load(files / "block1.onnx")
    (node,) = (node for node in model.graph.node if node.op_type == "Relu")
    node.op_type = "Abs"
    onnx.save(model, tmp_path / "wrong.onnx")
    wrong = verify(Model(), X, tmp_path / "wrong.onnx").diverging
    assert wrong is not None
    assert (wrong.address, wrong.first_node) == ("block@1", node.name)
    report = verify_against(tmp_path / "wrong.onnx", files / "whole.onnx")
    assert not report.agrees
    assert report.first_beyond == "block.norm@1"


def test_a_record_of_a_call_that_it_does_not_have_is_refused(files: Path, tmp_path: Path) -> None:
    model = onnx.load(files / "block1.onnx")
    (record,) = (one for one in model.metadata_props if one.key == "modelexport.cut_from")
    record.value = record.value.replace('"block@1"', '"block"')
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(FileFormatError, match="was cut out as the call 'block', which it does not have"):
        verify(Model(), X, tmp_path / "other.onnx")


def test_inputs_of_which_the_file_does_not_tell_are_known_by_shape(files: Path) -> None:
    assert verify(Model(), X, files / "alone.onnx").agrees


def test_what_is_missing_is_said(files: Path) -> None:
    with pytest.raises(UsageError, match=r"is the call 'block@1' of whole.onnx: compare the two"):
        verify_reference(files / "block1.onnx")

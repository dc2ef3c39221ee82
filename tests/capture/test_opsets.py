"""Every opset from 9 to 24: either exported with that opset and tags, or refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

from modelexport import export
from modelexport.errors import CaptureError, UsageError


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.relu(self.linear(x)))


def _opset(path: Path) -> int:
    return next(entry.version for entry in onnx.load(path).opset_import if not entry.domain)


@pytest.mark.sweep
@pytest.mark.parametrize("opset", range(9, 25))
def test_a_file_is_of_the_opset_that_was_asked_for_and_tagged(opset: int, tmp_path: Path) -> None:
    result = export(Small(), (torch.ones(2, 4),), tmp_path / "m.onnx", opset=opset)
    assert _opset(tmp_path / "m.onnx") == opset
    assert (result.coverage.inferred, result.coverage.untagged) == (0, 0)
    assert {node.call for node in result.hierarchy.nodes} == {"linear", "norm", ""}
    assert result.check is not None
    assert result.check.status == "passed"


@pytest.mark.parametrize("opset", [15, pytest.param(17, marks=pytest.mark.slow)])
def test_below_18_owners_come_through_the_conversion(opset: int, tmp_path: Path) -> None:
    given = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.ReLU()).eval(), torch.ones(1, 2, 4, 4)
    old = export(*given, tmp_path / "old.onnx", opset=opset, frontend="dynamo", check=False)
    new = export(*given, tmp_path / "new.onnx", opset=18, frontend="dynamo", check=False)
    assert _opset(tmp_path / "old.onnx") == opset
    assert old.coverage == new.coverage
    owners: list[Any] = [{(n.op_type, n.call) for n in result.hierarchy.nodes} for result in (old, new)]
    assert owners[0] == owners[1]


def test_if_onnx_cannot_convert_the_graph_the_reason_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="from opset 18 to opset 12") as caught:
        export(Small(), (torch.ones(2, 4),), tmp_path / "m.onnx", opset=12, frontend="dynamo")
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "m.onnx").exists()


@pytest.mark.parametrize("opset", [8, 25])
def test_an_opset_that_no_front_end_writes_is_refused(opset: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="choose one from 9 to 24"):
        export(Small(), (torch.ones(2, 4),), tmp_path / "m.onnx", opset=opset)

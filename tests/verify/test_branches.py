"""Files with branches and loops: calls inside and outside are compared with PyTorch's, whichever branch is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from modelexport.pytorch.model_run import ModelRun
from torch import nn

import models
from exports import Exporter
from modelexport import export, verify, verify_reference
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.verify.verdicts import VerifyReport

NAMES = ("condition", "nested-branches", "loop")


def positive() -> dict[str, torch.Tensor]:
    return {"x": torch.linspace(-1, 2, 16).reshape(2, 8)}


def negative() -> dict[str, torch.Tensor]:
    return {"x": -positive()["x"]}


@pytest.mark.parametrize("inputs", [positive, negative])
@pytest.mark.parametrize("name", NAMES)
def test_every_call_in_every_branch_and_loop_agrees(
    name: str, inputs: Callable[[], dict[str, Any]], exported: Exporter
) -> None:
    report = verify(models.case(name).build(), inputs(), exported(name).path)
    assert report.agrees, report.diverging
    assert {call.status for call in report.calls if call.nodes} == {"agree"}


@pytest.mark.parametrize("name", ["condition", "loop"])
def test_values_in_branches_and_loops_are_among_the_reference_values(name: str, tmp_path: Path) -> None:
    case = models.case(name)
    export(case.build(), case.inputs(), tmp_path / "m.onnx", reference=True)
    report = verify_reference(tmp_path / "m.onnx")
    assert report.agrees
    assert {call.status for call in report.calls if call.nodes} == {"agree"}


def in_bodies(model: ir.Model) -> dict[str, ir.Node]:
    """The nodes in branches and loop bodies by name."""
    return {node.name or "": node for node in model.graph.all_nodes() if node.graph is not model.graph}


def with_fault(name: str, node: str, exported: Exporter, folder: Path) -> tuple[VerifyReport, str]:
    """The report on a file in which a node's result is a hundredth larger, and the call that owns the node."""
    source = load_onnx(exported(name).path)
    one = next(each for each in source.graph.all_nodes() if each.name == node)
    factor = ir.Node("", "Constant", [], [ir.AttrTensor("value", ir.tensor(np.array(1.01, np.float32)))], name="factor")
    value = one.outputs[0]
    result = ir.Node("", "Mul", [value, factor.outputs[0]], name="fault")
    result.outputs[0].name, factor.outputs[0].name = "faulty", "factor"
    result.outputs[0].shape, result.outputs[0].type = value.shape, value.type
    value.replace_all_uses_with(result.outputs[0], replace_graph_outputs=True)
    result.replace_input_with(0, value)
    for each in (factor, result):
        each.metadata_props.update(one.metadata_props)
    assert one.graph is not None
    one.graph.insert_after(one, [factor, result])
    save_model(source, folder / "m.onnx")
    case = models.case(name)
    return verify(case.build(), case.inputs(), folder / "m.onnx"), one.metadata_props["modelexport.call"]


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_in_any_branch_or_loop_is_found_in_its_call(name: str, exported: Exporter, tmp_path: Path) -> None:
    inside = in_bodies(load_onnx(exported(name).path))
    wanted = [node for node, one in inside.items() if one.op_type in ("Gemm", "Relu")]
    assert wanted
    for node in wanted[:: max(1, len(wanted) // 4)]:
        report, call = with_fault(name, node, exported, tmp_path)
        assert report.verdict == "differ"
        assert report.diverging is not None
        assert report.diverging.address == call, node


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_beside_a_branch_or_loop_is_found_in_its_call(name: str, exported: Exporter, tmp_path: Path) -> None:
    source = load_onnx(exported(name).path)
    for node in [one.name or "" for one in source.graph if one.op_type == "LayerNormalization"]:
        report, call = with_fault(name, node, exported, tmp_path)
        assert report.diverging is not None
        assert report.diverging.address == call, node


def test_a_wrong_number_that_decides_rightly_is_found(exported: Exporter, tmp_path: Path) -> None:
    report, call = with_fault("condition", "node_sum_1", exported, tmp_path)
    assert call == ""
    assert report.verdict == "differ"
    assert report.diverging is not None
    assert report.diverging.address == call
    assert report.diverging.reason.startswith("faulty: 1 of 1 elements differ")
    assert {one.status for one in report.outputs} == {"agree"}


def test_a_call_that_takes_what_was_before_an_operation_is_found_if_it_only_decides(
    exported: Exporter, tmp_path: Path
) -> None:
    source = load_onnx(exported("nested-branches").path)
    scores = next(one for one in source.graph if one.metadata_props["modelexport.call"] == "gate.score@1")
    taken = scores.inputs[0]
    before = taken.producer() if taken is not None else None
    assert before is not None
    assert before.op_type == "Sub"
    scores.replace_input_with(0, before.inputs[0])
    save_model(source, tmp_path / "m.onnx")
    case = models.case("nested-branches")
    report = verify(case.build(), case.inputs(), tmp_path / "m.onnx")
    assert {call.address for call in report.calls if call.status == "differ"} == {"gate.score@1"}


class Tables(nn.Module):
    """The first branch does not run for the numbers for which the other one is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large, self.last = nn.Embedding(10, 8), nn.Embedding(100, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y = torch.cond(
            ids.max() < 10, lambda i: self.last(self.small(i)), lambda i: self.last(self.large(i)) + 1, (ids,)
        )
        return self.last(y)


def test_beside_a_branch_that_cannot_run_other_calls_are_compared(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tables().eval()
    export(model, {"ids": torch.tensor([[1, 4, 7]])}, tmp_path / "m.onnx")
    report = verify(model, {"ids": torch.tensor([[11, 42, 7]])}, tmp_path / "m.onnx")
    assert report.agrees
    statuses = {call.address: call.status for call in report.calls}
    assert statuses["last"] == "agree"
    untold = {call.reason for call in report.calls if call.status == "not compared"}
    assert len(untold) == 1
    assert "inside a branch that cannot run with these inputs" in untold.pop()


class Counting(nn.Module):
    """A branch that changes a buffer."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.yes, self.no = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def counted(y: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return self.no(y) * self.count

        return torch.cond(x.sum() > 0, self.yes, counted, (x,)) + self.count


def addresses(run: ModelRun) -> Mapping[str, Any]:
    return {call.address: call for call in run.parents}


def test_a_branch_that_is_not_taken_changes_nothing() -> None:
    model = Counting().eval()
    right = model.yes(torch.ones(1, 4)).detach().numpy()
    run = ModelRun(model, (torch.ones(1, 4),), bodies=True)
    assert np.array_equal(run.outputs[0], right)
    assert model.count == 0
    assert "no" not in addresses(run)


class Made(nn.Module):
    """A branch that writes to what it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.yes, self.no = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, self.yes, lambda y: self.no(y).mul_(2), (x,))


def test_a_branch_that_is_not_taken_may_write_to_what_it_has_made() -> None:
    run = ModelRun(Made().eval(), (torch.ones(1, 4),), bodies=True)
    assert list(addresses(run)) == ["", "yes", "no"]

"""Faults in models of unusual structure, found and placed: no numbers returned, selections that select all, squares."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from modelexport import export, verify
from modelexport.core.owners import Evidence
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.format import keys
from modelexport.format.node_tags import write_tags
from modelexport.verify.verdicts import VerifyReport


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def with_fault(
    kind: type[nn.Module], inputs: dict[str, Any], path: Path, plant: Callable[[ir.Graph], None]
) -> VerifyReport:
    """The report on a file with a fault; on the sound one, nothing is accused."""
    torch.manual_seed(0)
    model = kind().eval()
    export(model, inputs, path / "sound.onnx")
    assert verify(model, inputs, path / "sound.onnx").agrees
    file = load_onnx(path / "sound.onnx")
    plant(file.graph)
    save_model(file, path / "faulty.onnx")
    report = verify(model, inputs, path / "faulty.onnx")
    assert report.verdict == "differ"
    return report


def first(report: VerifyReport) -> str | None:
    """The call that the report lists first."""
    return None if report.diverging is None else report.diverging.address


def node_of(graph: ir.Graph, op_type: str, position: int = 0) -> ir.Node:
    return [node for node in graph if node.op_type == op_type][position]


def own(node: ir.Node, graph: ir.Graph, *calls: str) -> None:
    """Give a node other owners."""
    tags = {one.metadata_props[keys.CALL]: one.metadata_props[keys.SOURCE_MODULE] for one in graph}
    write_tags(node.metadata_props, list(calls), [tags[call] for call in calls], Evidence.EXACT)
    node.metadata_props.pop(keys.LAYER_ANNOTATION)
    node.metadata_props.pop(keys.NAMESPACE)


class Softened(nn.Module):
    """The exporter's Softplus chooses of two values, and takes one everywhere; the caller moves the result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(8, 8), nn.Softplus(beta=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)) + self.act(self.layer(x)).unflatten(-1, (2, 4)).mT.flatten(1)


def test_what_leads_to_a_selection_that_takes_one_everywhere_is_of_the_call_that_selects(tmp_path: Path) -> None:
    def plant(graph: ir.Graph) -> None:
        softplus = node_of(graph, "Softplus").inputs[0].producer()
        assert softplus is not None and softplus.op_type == "Mul"
        own(softplus, graph, "")

    report = with_fault(Softened, {"x": numbers(3, 8)}, tmp_path, plant)
    assert first(report) == ""
    assert "computed in act" in next(call.reason for call in report.calls if call.address == "")


class Deviations(nn.Module):
    """A few numbers for each row, computed in steps that PyTorch does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y / (y.std(-1, keepdim=True) + 1e-5)


def test_a_few_numbers_are_where_what_they_are_made_of_is(tmp_path: Path) -> None:
    def plant(graph: ir.Graph) -> None:
        own(node_of(graph, "Sqrt"), graph, "", "layer")

    report = with_fault(Deviations, {"x": numbers(3, 8)}, tmp_path, plant)
    assert "the tags are wrong" in next(call.reason for call in report.calls if call.address == "layer")


class Chooses(nn.Module):
    """Returns what its numbers decide alone, which most wrong numbers do not change."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.score = nn.Embedding(32, 8), nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.score(self.table(ids).mean(1)).abs() > 5).long()


class Rounds(Chooses):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.round(self.score(self.table(ids).mean(1)) / 10)


@pytest.mark.parametrize("kind", [Chooses, Rounds])
def test_calls_are_compared_on_other_inputs_where_numbers_only_decide(kind: type[nn.Module], tmp_path: Path) -> None:
    def plant(graph: ir.Graph) -> None:
        """The id 0, which the example does not have, gets another row."""
        table = node_of(graph, "Gather").inputs[0]
        assert table is not None and table.const_value is not None
        least = ir.Value(name="least", const_value=ir.tensor(np.array(1), name="least"))
        least.type, least.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([])
        graph.initializers.add(least)
        gather = node_of(graph, "Gather")
        ids = ir.Node("", "Max", [gather.inputs[1], least], name="most", metadata_props=dict(gather.metadata_props))
        ids.outputs[0].name, ids.outputs[0].type = "most_0", ir.TensorType(ir.DataType.INT64)
        ids.outputs[0].shape = gather.inputs[1].shape
        graph.insert_before(gather, ids)
        gather.replace_input_with(1, ids.outputs[0])

    ids = torch.randint(3, 32, (3, 6), generator=torch.Generator().manual_seed(1))
    assert first(with_fault(kind, {"ids": ids}, tmp_path, plant)) == "table"


class Largest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layer(x)
        return y, y.argmax(-1)


def test_an_output_of_another_shape_is_of_the_call_that_makes_it(tmp_path: Path) -> None:
    def plant(graph: ir.Graph) -> None:
        node_of(graph, "ArgMax").attributes["axis"] = ir.AttrInt64("axis", 0)

    report = with_fault(Largest, {"x": numbers(2, 4, 8)}, tmp_path, plant)
    assert first(report) == ""
    assert report.diverging is not None
    assert "expected int64[2, 4], got int64[4, 5]" in report.diverging.reason


class Square(nn.Module):
    """Transposes, between two calls, what is as high as it is wide."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.after(self.before(x).mT)
        return result


def test_a_transpose_that_leaves_a_square_as_it_is_is_wrong_itself(tmp_path: Path) -> None:
    def plant(graph: ir.Graph) -> None:
        node_of(graph, "Transpose").attributes["perm"] = ir.AttrInt64s("perm", [0, 1, 2])

    assert first(with_fault(Square, {"x": numbers(2, 8, 8)}, tmp_path, plant)) == ""

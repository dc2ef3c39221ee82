"""Nodes of a call that are given to a call around it or inside it, and what values tell of that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from torch import nn

from exports import Exporter
from modelexport import export, verify
from modelexport.core.owners import Evidence
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.format import keys
from modelexport.format.node_tags import write_tags


class Head(nn.Module):
    """Its products are not biased, and it reshapes what its projections return."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.query, self.key = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        query, key = (one(x).view(2, 5, 2, 4).transpose(1, 2) for one in (self.query, self.key))
        return (query @ key.transpose(-1, -2)).softmax(-1)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = Head()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(ids) * 1.5
        return result


def given_to(path: Path, is_node: Callable[[ir.Node], bool], address: str) -> Path:
    """A file in which the last of some nodes has another owner."""
    file = load_onnx(path)
    tags = {node.metadata_props[keys.CALL]: node.metadata_props[keys.SOURCE_MODULE] for node in file.graph}
    properties = [node for node in file.graph if is_node(node)][-1].metadata_props
    assert properties[keys.CALL] != address
    write_tags(properties, [address], [tags[address]], Evidence.EXACT)
    properties.pop(keys.LAYER_ANNOTATION)
    properties.pop(keys.NAMESPACE)
    save_model(file, path.with_name("faulty.onnx"))
    return path.with_name("faulty.onnx")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, dict[str, torch.Tensor], Path]:
    """A model, its inputs and its sound file."""
    torch.manual_seed(0)
    model, inputs, path = Whole().eval(), {"ids": torch.arange(10).view(2, 5)}, tmp_path_factory.mktemp("whole")
    export(model, inputs, path / "model.onnx")
    assert verify(model, inputs, path / "model.onnx").agrees
    return model, inputs, path / "model.onnx"


@pytest.mark.parametrize(
    ("owner", "op_type", "given"),
    [
        ("head.key", "MatMul", "head"),
        ("head.query", "MatMul", "head"),
        ("head.table", "Gather", "head"),
        ("head.table", "Gather", "head.query"),
    ],
)
def test_what_an_inner_call_computes_is_not_of_those_that_its_result_passes(
    owner: str, op_type: str, given: str, whole: tuple[nn.Module, dict[str, torch.Tensor], Path]
) -> None:
    model, inputs, path = whole

    def is_node(node: ir.Node) -> bool:
        return node.op_type == op_type and node.metadata_props[keys.CALL] == owner

    report = verify(model, inputs, given_to(path, is_node, given))
    assert report.diverging is not None
    assert report.diverging.address == given
    assert f"computed in {owner}" in report.diverging.reason


def test_rows_of_experts_are_not_of_the_activation_between_their_products(exported: Exporter, tmp_path: Path) -> None:
    """The activation returns its rows in another order, with the float64 kernels, too, so that its end is known."""
    sound = exported("mixtral")
    path = tmp_path / "model.onnx"
    save_model(load_onnx(sound.path), path)
    experts = "model.layers.1.mlp.experts"

    def is_node(node: ir.Node) -> bool:
        return node.op_type == "MatMul" and node.metadata_props[keys.CALL] == experts

    report = verify(sound.case.build(), sound.case.inputs(), given_to(path, is_node, f"{experts}.act_fn"))
    assert report.diverging is not None
    assert report.diverging.address == f"{experts}.act_fn"
    assert f"computed in {experts}, node_" in report.diverging.reason

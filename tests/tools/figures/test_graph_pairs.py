"""Two files node by node: what was added, removed, changed or fused is found, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, numpy_helper
from onnx.helper import make_attribute, make_node

import modelexport
from exports import Exporter
from modelexport.core.calls import ModuleCall
from modelexport.graph.node_owners import required_owner
from modelexport.tables.graph_pairs import NodePair, count_marks, pair_nodes
from modelexport.tagged.file import read_tagged

Edit = Callable[[ModelProto], None]


def node_of(model: ModelProto, operator: str, count: int = 0) -> NodeProto:
    return [node for node in model.graph.node if node.op_type == operator][count]


def marked(pairs: list[NodePair], mark: str) -> tuple[list[str], list[str]]:
    """The operators with a mark in the first and in the second file."""
    chosen = [pair for pair in pairs if pair.mark == mark]
    sides = ([pair.first for pair in chosen], [pair.second for pair in chosen])
    first, second = ([node.op_type for node in side if node is not None] for side in sides)
    return first, second


def a_weight(model: ModelProto) -> None:
    weight = next(tensor for tensor in model.graph.initializer if tensor.name.endswith("intermediate.dense.bias"))
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) + 1, weight.name))


def an_attribute(model: ModelProto) -> None:
    gelu = node_of(model, "Gelu")
    del gelu.attribute[:]
    gelu.attribute.append(make_attribute("approximate", "tanh"))


def an_operator(model: ModelProto) -> None:
    gelu = node_of(model, "Gelu")
    del gelu.attribute[:]
    gelu.op_type = "Relu"


def an_addition(model: ModelProto) -> None:
    gelu, place = node_of(model, "Gelu"), list(model.graph.node).index(node_of(model, "Gelu"))
    added = make_node("Relu", [gelu.output[0]], ["relu"], "added")
    for node in model.graph.node:
        node.input[:] = ["relu" if name == gelu.output[0] else name for name in node.input]
    model.graph.node.insert(place + 1, added)


def a_removal(model: ModelProto) -> None:
    gelu = node_of(model, "Gelu")
    for node in model.graph.node:
        node.input[:] = [gelu.input[0] if name == gelu.output[0] else name for name in node.input]
    model.graph.node.remove(gelu)


def a_fusion(model: ModelProto) -> None:
    """The Add before the first Gelu and that Gelu become one operator of ONNX Runtime."""
    gelu = node_of(model, "Gelu")
    add = next(node for node in model.graph.node if gelu.input[0] in node.output)
    fused = make_node("BiasGelu", list(add.input), list(gelu.output), "fused", domain="com.microsoft")
    model.graph.node.insert(list(model.graph.node).index(gelu), fused)
    model.graph.node.remove(add)
    model.graph.node.remove(gelu)
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))


def a_line(model: ModelProto) -> None:
    """The second Gelu takes what the first one takes."""
    node_of(model, "Gelu", 1).input[0] = node_of(model, "Gelu").input[0]


def a_block(model: ModelProto) -> None:
    """The second layer is left out."""
    ends = [n.output[0] for n in model.graph.node if n.op_type == "LayerNormalization"]
    first, last = ends[-3], ends[-1]
    start = next(i for i, node in enumerate(model.graph.node) if first in node.output)
    end = next(i for i, node in enumerate(model.graph.node) if last in node.output)
    for node in list(model.graph.node)[start + 1 : end + 1]:
        model.graph.node.remove(node)
    for node in model.graph.node:
        node.input[:] = [first if name == last else name for name in node.input]
    for output in model.graph.output:
        if output.name == last:
            model.graph.node.append(make_node("Identity", [first], [last], "same"))


EDITS: dict[str, tuple[Edit, str, list[str], list[str]]] = {
    "weight": (a_weight, "changed", ["Add"], ["Add"]),
    "attribute": (an_attribute, "changed", ["Gelu"], ["Gelu"]),
    "operator": (an_operator, "changed", ["Gelu"], ["Relu"]),
    "added": (an_addition, "added", [], ["Relu"]),
    "removed": (a_removal, "removed", ["Gelu"], []),
    "fused": (a_fusion, "fused", ["Add", "Gelu"], ["BiasGelu"]),
    "line": (a_line, "changed", ["Gelu"], ["Gelu"]),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_was_edited_is_marked_and_nothing_else(name: str, exported: Exporter, tmp_path: Path) -> None:
    edit, mark, first, second = EDITS[name]
    model = onnx.load(exported("bert").path)
    edit(model)
    onnx.save(model, tmp_path / "edited.onnx")
    pairs = pair_nodes(read_tagged(exported("bert").path), read_tagged(tmp_path / "edited.onnx"))
    assert marked(pairs, mark) == (first, second)
    assert {*count_marks(pairs)} == {mark}


def test_every_node_of_a_file_is_the_same_in_itself(exported: Exporter) -> None:
    case = exported("condition")
    pairs = pair_nodes(read_tagged(case.path), read_tagged(case.path))
    assert count_marks(pairs) == {}
    assert all(pair.first is not None and pair.second is not None for pair in pairs)


def test_a_block_that_was_left_out_is_removed(exported: Exporter, tmp_path: Path) -> None:
    model = onnx.load(exported("bert").path)
    a_block(model)
    onnx.save(model, tmp_path / "edited.onnx")
    first = read_tagged(exported("bert").path)
    pairs = pair_nodes(first, read_tagged(tmp_path / "edited.onnx"))
    removed = [
        pair.first.name for pair in pairs if pair.mark in ("removed", "changed", "fused") and pair.first is not None
    ]
    inside = first.calls.inside(ModuleCall("encoder.layer.1"))
    assert {*removed} == {node.name for node in first.nodes if required_owner(node).call in inside}


@pytest.mark.parametrize("to", ["int8-dynamic", "int4"])
def test_quantized_products_are_changed(to: str, exported: Exporter, tmp_path: Path) -> None:
    modelexport.quantize(exported("bert").path, tmp_path / "to.onnx", to=to, only=["encoder.layer.0.intermediate"])
    pairs = pair_nodes(read_tagged(exported("bert").path), read_tagged(tmp_path / "to.onnx"))
    assert marked(pairs, "changed")[0] == ["MatMul"]
    assert {*count_marks(pairs)} == {"changed"}


def test_weights_of_another_run_are_changed(exported: Exporter, tmp_path: Path) -> None:
    model = onnx.load(exported("bert").path)
    generator = np.random.default_rng(0)
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype == np.float32 and array.ndim == 2:
            tensor.CopyFrom(numpy_helper.from_array(generator.random(array.shape, np.float32), tensor.name))
    onnx.save(model, tmp_path / "edited.onnx")
    pairs = pair_nodes(read_tagged(exported("bert").path), read_tagged(tmp_path / "edited.onnx"))
    assert {*marked(pairs, "changed")[0]} <= {"MatMul", "Gemm", "Gather"}
    assert {*count_marks(pairs)} == {"changed"}

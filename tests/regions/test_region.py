"""Regions of small graphs: their boundaries, and other nodes put in their place."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from modelexport.core.calls import ModuleCall
from modelexport.core.owners import Owner
from modelexport.graph.node_owners import owner_of
from modelexport.regions.region import Region, put, weights_of

GRAPH = """<ir_version: 10, opset_import: ["": 18]>
graph (float[2] x) => (float[2] y, float[2] z) <float[2] w = {1, 2}> {
    [add] a = Add(x, w)
    [neg] b = Neg(a)
    [exp] z = Exp(b)
    [abs] c = Abs(b)
    [sum] y = Add(c, a)
}"""
OWNER = Owner((ModuleCall("layer", 0),))


@pytest.fixture
def model() -> ir.Model:
    return ir.from_onnx_text(GRAPH)


def region(model: ir.Model, *names: str) -> Region:
    return Region.of(node for node in model.graph if node.name in names)


def put_node(model: ir.Model, op_type: str, *replaced: str, taken: str = "x") -> int:
    """Replace some nodes by one that takes a value of the graph."""
    values = {value.name: value for node in model.graph for value in (*node.inputs, *node.outputs) if value is not None}
    node = ir.node(op_type, [values[taken]])
    return put(model, [node], node.outputs, region(model, *replaced), {node: OWNER})


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def test_inputs_of_a_region_are_values_of_others_without_weights(model: ir.Model) -> None:
    assert [value.name for value in region(model, "add", "neg").inputs] == ["x"]


def test_outputs_of_a_region_are_values_that_others_or_the_graph_take(model: ir.Model) -> None:
    assert [value.name for value in region(model, "add", "neg", "exp").outputs] == ["a", "b", "z"]


def test_weights_of_a_region_are_the_initializers_that_its_nodes_take(model: ir.Model) -> None:
    assert [value.name for value in weights_of(region(model, "add", "neg").nodes)] == ["w"]


def test_a_region_between_values_has_the_nodes_that_lead_from_one_to_the_other(model: ir.Model) -> None:
    by_name = {value.name: value for node in model.graph for value in node.outputs}
    found = Region.between([by_name["y"]], lambda value: value.producer() is not None and value is not by_name["b"])
    assert {node.name for node in found.nodes} == {"sum", "abs", "add"}


def test_a_new_node_takes_the_place_of_a_region(model: ir.Model) -> None:
    put_node(model, "Relu", "neg")
    assert operators(model) == ["Add", "Relu", "Exp", "Abs", "Add"]


def test_a_result_has_the_name_of_the_value_in_whose_place_it_is(model: ir.Model) -> None:
    put_node(model, "Relu", "exp")
    assert [value.name for value in model.graph.outputs] == ["y", "z"]


def test_the_owner_of_a_new_node_is_the_given_one(model: ir.Model) -> None:
    put_node(model, "Relu", "neg")
    assert [owner_of(node) for node in model.graph if node.op_type == "Relu"] == [OWNER]


def test_a_weight_goes_with_the_last_node_that_took_it(model: ir.Model) -> None:
    put_node(model, "Relu", "add")
    assert not model.graph.initializers


def test_a_node_of_a_region_stays_if_others_use_its_value(model: ir.Model) -> None:
    kept = Region(region(model, "add", "neg").nodes, [], region(model, "neg").outputs)
    node = ir.node("Relu", [model.graph.inputs[0]])
    assert put(model, [node], node.outputs, kept, {}) == 1


def test_a_name_that_the_model_has_gets_the_label_in_front(model: ir.Model) -> None:
    node = ir.node("Relu", [model.graph.inputs[0]], name="sum")
    put(model, [node], node.outputs, region(model, "neg"), {}, label="layer")
    assert node.name == "layer/sum"


def test_new_nodes_come_after_what_they_take(model: ir.Model) -> None:
    put_node(model, "Relu", "exp", taken="c")
    assert operators(model) == ["Add", "Neg", "Abs", "Relu", "Add"]


def test_nodes_that_take_what_is_computed_from_their_results_are_refused(model: ir.Model) -> None:
    with pytest.raises(ValueError, match="cycle"):
        put_node(model, "Relu", "neg", taken="c")

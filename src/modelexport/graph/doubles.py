"""A model in which nodes compute in float64, from float32 numbers, and round what they give to float32.

``Sigmoid`` is written with ``Exp``: ONNX Runtime's float64 kernel adds to a half, so that nothing is left below -37.
``Softplus`` stays in float32: its float64 kernel takes the logarithm of a sum with one, the float32 one is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from modelexport.graph.copies import copy_of
from modelexport.graph.types import schema_of


@dataclass(frozen=True)
class Doubled:
    """A node, and which of its inputs and outputs become float64."""

    node: ir.Node
    inputs: Sequence[int]
    outputs: Sequence[int]


def in_doubles(model: ir.Model, can: Callable[[Doubled], bool]) -> tuple[ir.Model, list[str]]:
    """A copy of a model whose nodes compute in float64 where they can, and the operators of these.

    All values keep their names and types. Nodes with graphs inside, and those in them, stay as they are.

    Args:
        can: Whether a node, as it would be, can be computed.
    """
    copy = copy_of(model)
    wide: dict[ir.Value, ir.Value] = {}
    found: dict[str, None] = {}
    for node in list(copy.graph):
        doubled = _doubled(node, copy.opset_imports.get(node.domain, 0))
        if doubled is not None and can(doubled):
            found[node.op_type] = None
            _compute_in_double(doubled, wide)
    return copy, list(found)


def _doubled(node: ir.Node, version: int) -> Doubled | None:
    """The float32 inputs and outputs of one type parameter that may be float64; ``None`` if there are none."""
    schema = schema_of(node, version)
    if schema is None or (node.domain, node.op_type) == ("", "Softplus"):
        return None
    if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()):
        return None
    free = {
        one.type_param_str
        for one in schema.type_constraints
        if {"tensor(float)", "tensor(double)"} <= {*one.allowed_type_strs}
    }
    given, made = (
        _places(schema_side, values, free)
        for schema_side, values in ((schema.inputs, node.inputs), (schema.outputs, node.outputs))
    )
    # What the type of an attribute says is not that of an input.
    both = set(given.values()) & set(made.values())
    inputs, outputs = ([place for place, name in side.items() if name in both] for side in (given, made))
    return Doubled(node, inputs, outputs) if inputs and outputs else None


def _places(
    side: Sequence[onnx.defs.OpSchema.FormalParameter], values: Sequence[ir.Value | None], free: set[str]
) -> dict[int, str]:
    """The places of float32 values to their type parameters."""
    found = {}
    for place, value in enumerate(values):
        name = side[min(place, len(side) - 1)].type_str if side else ""
        if value is not None and value.name and value.dtype is ir.DataType.FLOAT and name in free:
            found[place] = name
    return found


def _compute_in_double(doubled: Doubled, wide: dict[ir.Value, ir.Value]) -> None:
    node = doubled.node
    graph = node.graph
    assert graph is not None
    for place in doubled.inputs:
        value = node.inputs[place]
        assert value is not None
        if value not in wide:
            cast = _cast(value, ir.DataType.DOUBLE, f"{value.name}.double")
            wide[value] = cast.outputs[0]
            graph.insert_before(node, cast)
        node.replace_input_with(place, wide[value])
    for place in doubled.outputs:
        value = node.outputs[place]
        name = value.name or ""
        cast = _cast(value, ir.DataType.FLOAT, f"{name}.single")
        single = cast.outputs[0]
        single.shape, single.type = value.shape, ir.TensorType(ir.DataType.FLOAT)
        graph.insert_after(node, cast)
        ir.convenience.replace_all_uses_with(value, single, replace_graph_outputs=True)
        cast.replace_input_with(0, value)
        value.name, single.name, value.type = f"{name}.in_double", name, ir.TensorType(ir.DataType.DOUBLE)
    if (node.domain, node.op_type) == ("", "Sigmoid"):
        _write_out_sigmoid(node)


def _write_out_sigmoid(node: ir.Node) -> None:
    graph, result = node.graph, node.outputs[0]
    assert graph is not None
    one = ir.Node("", "Constant", [], [ir.AttrTensor("value", ir.tensor(1.0, ir.DataType.DOUBLE))])
    negative = ir.Node("", "Neg", [node.inputs[0]])
    grown = ir.Node("", "Exp", negative.outputs)
    total = ir.Node("", "Add", [one.outputs[0], grown.outputs[0]])
    inverse = ir.Node("", "Reciprocal", total.outputs)
    for made, what in ((one, "one"), (negative, "negative"), (grown, "exp"), (total, "sum"), (inverse, "inverse")):
        made.name = made.outputs[0].name = f"{result.name}.{what}"
        made.outputs[0].type = ir.TensorType(ir.DataType.DOUBLE)
        graph.insert_before(node, made)
    ir.convenience.replace_all_uses_with(result, inverse.outputs[0])
    graph.remove(node, safe=True)


def _cast(value: ir.Value, dtype: ir.DataType, name: str) -> ir.Node:
    cast = ir.Node("", "Cast", [value], [ir.AttrInt64("to", dtype.value)], name=name)
    cast.outputs[0].name, cast.outputs[0].type, cast.outputs[0].shape = name, ir.TensorType(dtype), value.shape
    return cast

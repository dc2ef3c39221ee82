"""Values whose number of axes depends on the size of a dynamic axis: no declared shape is true for all sizes."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.graph.nodes import CONTRIBUTED, nested_graphs, values_taken


def undetermined_ranks(model: ir.Model) -> frozenset[ir.Value]:
    """The values after a ``Squeeze`` of all axes of size one, or an ``If`` with branches of unlike rank, in a model
    with dynamic axes.
    """
    found: set[ir.Value] = set()
    if any(not isinstance(size, int) for value in model.graph.inputs for size in value.shape or ()):
        _collect(model.graph, found)
    return frozenset(found)


def forget_undetermined_ranks(model: ir.Model) -> list[str]:
    """Drop the declared shapes of values whose number of axes depends on a size, in place.

    The outputs of the graph keep the shape of the capture, because ONNX requires a rank of each.

    Returns:
        The names of such outputs.
    """
    undetermined = undetermined_ranks(model)
    for value in undetermined.difference(model.graph.outputs):
        value.shape = None
    return [value.name or "" for value in model.graph.outputs if value in undetermined]


def _collect(graph: ir.Graph, found: set[ir.Value]) -> None:
    """Add the values of a graph and of the graphs nested in it."""
    for node in graph:
        depends = not found.isdisjoint(values_taken(node))
        for nested in nested_graphs(node):
            found.update(nested.inputs if depends else ())
            _collect(nested, found)
        if _is_undetermined(node, depends, found):
            found.update(node.outputs)


def _is_undetermined(node: ir.Node, depends: bool, found: set[ir.Value]) -> bool:
    if node.domain == CONTRIBUTED:  # an attention takes the length of its cache as a scalar or a row of one number
        return not found.isdisjoint(node.inputs[:1])
    match node.domain, node.op_type:
        case "", "If":
            pairs = list(zip(*(branch.outputs for branch in nested_graphs(node)), strict=False))
            return any(not found.isdisjoint(pair) or len({_rank(value) for value in pair}) > 1 for pair in pairs)
        case "", "Squeeze" if _takes_no_axes(node):
            taken = node.inputs[0]
            return depends or taken is None or taken.shape is None or not taken.shape.is_static()
        case "", "Reshape":
            return not found.isdisjoint(node.inputs[1:])  # before opset 5 it is an attribute
        case "", operator if operator.startswith("Reduce") and _takes_no_axes(node):
            return depends and node.attributes.get_int("keepdims", 1) == 1
    return depends


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _takes_no_axes(node: ir.Node) -> bool:
    return "axes" not in node.attributes and (len(node.inputs) == 1 or node.inputs[1] is None)

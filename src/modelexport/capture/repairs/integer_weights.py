"""Weights that a model quantizes itself, so that their integers can be stored as PyTorch computes them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.unique_names import free_name, names_in


def prepare_integer_weights(model: ir.Model) -> None:
    """Change how the integers of weights are computed and moved, in place."""
    for node in [node for node in model.graph if node.op_type == "QuantizeLinear"]:
        has_shapes = all(value is not None and value.shape is not None for value in node.inputs[:2])
        if has_shapes and all(map(_is_constant, node.inputs)) and "block_size" not in node.attributes:
            _multiply(model, node)
    _transpose_integers(model)


def _multiply(model: ir.Model, node: ir.Node) -> None:
    """Multiply by the inverse of the scale, as PyTorch does, and quantize with a scale of one, of the same shape.

    The largest number of a symmetric range is half a step beyond the last integer, where the last bit decides.
    """
    x, scale = node.inputs[:2]
    assert x is not None
    assert scale is not None
    inverse = ir.node("Reciprocal", [scale])
    new, factor = [inverse], inverse.outputs[0]
    rank, axis = len(x.shape or ()), node.attributes.get_int("axis", 1)
    if scale.shape is not None and len(scale.shape) == 1:
        sizes = ir.tensor(np.array([-1, *[1] * (rank - axis % rank - 1)], np.int64))
        new += [ir.node("Constant", [], {"value": sizes})]
        new += [ir.node("Reshape", [factor, new[-1].outputs[0]])]
        factor = new[-1].outputs[0]
    new += [ir.node("Mul", [x, factor]), ir.node("Div", [scale, scale])]
    for each in new:
        set_owner(each, owner_of(node))
    taken = names_in(model)
    for each in new:
        each.outputs[0].name = free_name(f"{node.outputs[0].name}_{each.op_type.lower()}", taken)
        taken.add(each.outputs[0].name)
    model.graph.insert_before(node, new)
    node.replace_input_with(0, new[-2].outputs[0])
    node.replace_input_with(1, new[-1].outputs[0])


def _transpose_integers(model: ir.Model) -> None:
    """Exchange ``DequantizeLinear`` and ``Transpose`` where the integers are computed from constants."""
    for node in [node for node in model.graph if node.op_type == "Transpose"]:
        value = node.inputs[0]
        back = value.producer() if value is not None else None
        if back is None or back.op_type != "DequantizeLinear" or "block_size" in back.attributes:
            continue
        if value is None or value.shape is None or not _is_constant(back.inputs[0]):
            continue
        rank = len(value.shape)
        order = list(node.attributes.get_ints("perm", list(reversed(range(rank)))))
        integers = ir.node("Transpose", [back.inputs[0]], {"perm": order})
        along = {"axis": order.index(back.attributes.get_int("axis", 1) % rank)} if "axis" in back.attributes else {}
        moved = ir.node("DequantizeLinear", [integers.outputs[0], *back.inputs[1:]], along)
        result = moved.outputs[0]
        result.name, result.type, result.shape = node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape
        for new, old in ((integers, node), (moved, back)):
            set_owner(new, owner_of(old))
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], [integers, moved], node.outputs, [result])


def _is_constant(value: ir.Value | None) -> bool:
    """Whether a value is computed from initializers and constants alone."""
    pending, seen = [value], set[ir.Value]()
    while pending:
        current = pending.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        node = current.producer()
        if node is None and not current.is_initializer():
            return False
        pending += node.inputs if node is not None else []
    return True

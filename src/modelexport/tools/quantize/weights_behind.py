"""Which weights a value has the elements of, as they are or moved to other places."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.graph.operator_kinds import MOVES_ELEMENTS

MOVES_WEIGHTS = MOVES_ELEMENTS | {"Concat", "Slice", "Split"}
"""Operators that move elements of a weight, none of them twice. A ``Gather`` computes with a weight of its own."""


def weight_behind(value: ir.Value | None) -> ir.Value | None:
    """The first initializer whose elements a value has (:func:`weights_behind`); ``None`` for any other value."""
    return next(iter(weights_behind(value)), None)


def weights_behind(value: ir.Value | None) -> tuple[ir.Value, ...]:
    """The initializers whose elements a value has, all or some of them, in any order; none if it is computed otherwise.

    A layer may use its weight transposed, an expert a slice of one, an LSTM its gates in another order, an attention
    its three weights as one.
    """
    if value is None:
        return ()
    producer = value.producer()
    if producer is not None:
        if producer.op_type not in MOVES_WEIGHTS or producer.domain:
            return ()
        moved = producer.inputs if producer.op_type == "Concat" else producer.inputs[:1]
        places = producer.inputs[len(moved) :]
        if not all(place is None or ir.convenience.get_const_tensor(place) is not None for place in places):
            return ()
        behind = [weights_behind(source) for source in moved]
        return tuple(dict.fromkeys(weight for weights in behind for weight in weights)) if all(behind) else ()
    is_weight = value.is_initializer() and not value.is_graph_input() and value.const_value is not None
    return (value,) if is_weight else ()


def same_tensors(first: ir.TensorProtocol | None, second: ir.TensorProtocol | None) -> bool:
    """Whether two tensors have the same type, shape and elements, bit for bit, or are both missing."""
    if first is None or second is None or first is second:
        return first is second
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if first.dtype == ir.DataType.STRING:  # which has no bytes
        return bool(first.numpy().tolist() == second.numpy().tolist())
    return first.tobytes() == second.tobytes()


def same_nodes(first: ir.Node, second: ir.Node) -> bool:
    """Whether two nodes compute the same from the same values, with the same weights, bit for bit."""
    names, now = ([value and value.name for value in (*node.inputs, *node.outputs)] for node in (first, second))
    if first.op_identifier() != second.op_identifier() or names != now or _written(first) != _written(second):
        return False
    pairs = zip(first.inputs, second.inputs, strict=True)
    held = ((before, after) for before, after in pairs if before is not None and after is not None)
    return all(same_tensors(before.const_value, after.const_value) for before, after in held if before.is_initializer())


def _written(node: ir.Node) -> list[bytes]:
    """The attributes of a node, with nested graphs, as they are written."""
    attributes = [node.attributes[name] for name in sorted(node.attributes)]
    return [ir.serde.serialize_attribute(attribute).SerializeToString(deterministic=True) for attribute in attributes]

"""Tensors bound to initializers, or detached while passes run: the only code that assigns a ``const_value``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from modelexport.graph.nodes import all_nodes, initializers


def bind_tensors(tensors: Mapping[ir.Value, ir.TensorProtocol]) -> None:
    """Assign each of these values its tensor, in place."""
    for value, tensor in tensors.items():
        value.const_value = tensor


def share_tensor(value: ir.Value, other: ir.Value) -> None:
    """Assign a value the tensor that another one has, in place."""
    if other.const_value is not None:
        bind_tensors({value: other.const_value})


def detach_tensors(values: Iterable[ir.Value]) -> dict[ir.Value, ir.TensorProtocol]:
    """Detach the tensors of initializers, in place, so that no pass can read their elements.

    Returns:
        The tensors, for :func:`bind_tensors`.
    """
    tensors = {value: value.const_value for value in values if value.const_value is not None}
    for value in tensors:
        value.const_value = None
    return tensors


def detach_parameters(
    model: ir.Model, names: Mapping[str, tuple[str, ...]], places: Mapping[str, ir.TensorProtocol]
) -> dict[ir.Value, ir.TensorProtocol]:
    """Detach the tensors of the initializers that are ``state_dict`` entries, in place.

    Args:
        names: The name of an initializer to its ``state_dict`` keys.
        places: The entries whose tensors in the graph have no bytes, to tensors that have.

    Returns:
        The tensor of each, for :func:`bind_tensors`.
    """
    detached = detach_tensors(value for value in initializers(model) if value.name in names)
    return {
        value: next((places[key] for key in names[value.name or ""] if key in places), tensor)
        for value, tensor in detached.items()
    }


def order_uses(model: ir.Model) -> None:
    """Put the uses of each initializer into the order of the nodes, as in a file that was read."""
    for node in all_nodes(model):
        for index, value in enumerate(node.inputs):
            if value is not None and value.is_initializer():
                node.replace_input_with(index, None)
                node.replace_input_with(index, value)

"""The shape inference of onnxscript's constant folding, once for equal nodes.

The folding asks ONNX for the types of the outputs of each node, and writes the node, the types of its inputs and their
small contents as protobuf to do so. The answer follows from what is written, and from what was known of the outputs, so
it is kept for the nodes of which all that is the same.

How much of an input it reads is a fact of onnxscript; ``tests/capture/test_once.py`` is the canary.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir

from modelexport.capture.patches import replaced
from modelexport.graph.copies import typed_as
from modelexport.graph.nodes import PLAIN_TYPES

_READ = 20
"""The largest number of elements of an input whose content the inference reads."""

Known = dict[Hashable, tuple[Hashable, list[tuple[ir.Shape | None, ir.TypeProtocol | None]]]]
"""All that is read of a node to the shapes and types of its outputs, to be compared and to be copied."""


@contextmanager
def inferred_once(known: Known) -> Iterator[None]:
    """Inside, constant folding infers the types of equal nodes once.

    Args:
        known: The answers so far; new ones are added.
    """

    def once(infer: Any) -> Any:
        def infer_once(folding: Any, node: ir.Node) -> None:
            key = _key(node, folding._opset_imports)
            if key not in known:
                infer(folding, node)
                if key is not None:
                    known[key] = _outputs(node), [typed_as(value.shape, value.type) for value in node.outputs]
                return
            found, typed = known[key]
            if found != _outputs(node):
                for value, (shape, type_) in zip(node.outputs, typed, strict=True):
                    value.shape, value.type = typed_as(shape, type_)

        return infer_once

    with replaced({"infer": once}):
        yield


def _key(node: ir.Node, opsets: dict[str, int]) -> Hashable | None:
    """All that the inference reads of a node; ``None`` if that is not known."""
    given = [value for value in node.inputs if value is not None]
    if len({value.name for value in given}) < len(set(given)) or None in {value.name for value in given}:
        return None
    position = {value: index for index, value in reversed(list(enumerate(node.inputs))) if value is not None}
    try:
        attributes = tuple(sorted((attribute.name, _attribute(attribute)) for attribute in node.attributes.values()))
        inputs = tuple(
            None if value is None else (position[value], *_typed(value), _content(value)) for value in node.inputs
        )
    except _UnknownError:
        return None
    return node.op_identifier(), opsets.get(node.domain), attributes, inputs, _outputs(node)


def _outputs(node: ir.Node) -> Hashable:
    return tuple([(value.name is not None, *_typed(value)) for value in node.outputs])


def _typed(value: ir.Value) -> tuple[Hashable, Hashable]:
    shape, kind = value.shape, value.type
    return kind.dtype if type(kind) is ir.TensorType else repr(kind), None if shape is None else tuple(
        [size if isinstance(size, int) else size.value for size in shape.dims]
    )


def _content(value: ir.Value) -> Hashable:
    tensor = value.const_value
    if tensor is None or tensor.size > _READ:
        return None
    if tensor.dtype == ir.DataType.STRING:
        raise _UnknownError
    return tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes()


class _UnknownError(Exception):
    """What an attribute or a tensor says is not compared."""


def _attribute(attribute: ir.Attr) -> str:
    if attribute.is_ref() or attribute.type not in PLAIN_TYPES:
        raise _UnknownError
    return f"{attribute.type} {attribute.value!r}"  # as text: 0.0 and -0.0 are equal numbers

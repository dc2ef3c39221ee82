"""The attributes of nodes as text, equal for equal attributes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping

import onnx
import onnx_ir as ir

from modelexport.format.dtypes import dtype_name

TENSOR_LIMIT = 2**16
"""The size up to which a tensor in an attribute is compared by its elements; above, only by type and shape."""


def format_attributes(node: ir.Node, version: int) -> str:
    """The attributes of a node as text, without those that have the default value: only some exporters write them."""
    defaults = _defaults(node.domain, node.op_type, version)
    texts = {name: _attribute(attribute) for name, attribute in sorted(node.attributes.items())}
    return "; ".join(f"{name}={text}" for name, text in texts.items() if text != defaults.get(name))


@functools.cache
def _defaults(domain: str, op_type: str, version: int) -> Mapping[str, str]:
    try:
        schema_of_operator = onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:  # an operator that only a runtime defines
        return {}
    return {
        name: _attribute(ir.serde.deserialize_attribute(attribute.default_value))
        for name, attribute in schema_of_operator.attributes.items()
        if attribute.default_value.type != onnx.AttributeProto.UNDEFINED
    }


def _attribute(attribute: ir.Attr) -> str:
    """An attribute as text: equal for equal attributes. The nodes in graphs are counted separately."""
    match attribute.type:
        case ir.AttributeType.GRAPH | ir.AttributeType.GRAPHS:
            return attribute.type.name
        case ir.AttributeType.TENSOR:
            return tensor_text(attribute.as_tensor())
        case ir.AttributeType.TENSORS:
            return ", ".join(map(tensor_text, attribute.as_tensors()))
    return f"{attribute.type.name} {attribute.value!r}"


def tensor_text(tensor: ir.TensorProtocol) -> str:
    """A tensor as text: equal for equal tensors, of large ones for those of equal type and shape."""
    typed = typed_text(dtype_name(tensor.dtype), tensor.shape)
    return typed if tensor.nbytes > TENSOR_LIMIT else f"{typed} {hashlib.sha256(tensor.tobytes()).hexdigest()}"


def typed_text(dtype: str, shape: Iterable[object]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"

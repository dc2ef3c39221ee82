"""The operators of plain models, with their attributes: read once for all nodes that have them alike."""

from __future__ import annotations

from sys import intern

import onnx
import onnx_ir as ir

from modelexport.files.tensors import check_tensor
from modelexport.files.text_fields import check_text
from modelexport.graph.plain import NO_ATTRIBUTES, Store

_TEXTS = (onnx.AttributeProto.FLOAT, onnx.AttributeProto.INT, onnx.AttributeProto.STRING)
_LISTS = (onnx.AttributeProto.FLOATS, onnx.AttributeProto.INTS, onnx.AttributeProto.STRINGS)
_SHARED = frozenset((*_TEXTS, *_LISTS))
"""Attributes that are equal if they are serialized alike."""
_TENSOR = onnx.AttributeProto.TENSOR

Operation = tuple[ir.OperatorIdentifier, Store, str | None, bool]
"""An operator, attributes, a doc string, and whether onnx_ir would write these in the same bytes."""


class RareError(Exception):
    """There is something in the model that a plain one cannot have, or a fault."""


class Operations:
    """What nodes say from their operator on, without properties, by their bytes."""

    def __init__(self) -> None:
        self.known: dict[bytes, Operation] = {}
        self.operators: dict[ir.OperatorIdentifier, ir.OperatorIdentifier] = {}
        self._attributes: dict[bytes, ir.Attr] = {}

    def read(self, data: bytes) -> Operation:
        """What a node says that is not known yet.

        Raises:
            RareError: It is nothing that plain nodes have.
            FileFormatError: A text is not text, or a tensor has too few or too many elements.
            google.protobuf.message.DecodeError, onnx_ir.serde.SerdeError, ValueError, TypeError: It has another fault.
        """
        node = onnx.NodeProto.FromString(data)
        check_known(node, data)
        if not node.HasField("op_type"):
            raise RareError  # onnx_ir writes an empty one
        texts = [field for field in ("domain", "overload", "doc_string") if node.HasField(field)]
        operator = intern(node.domain), intern(node.op_type), intern(node.overload)  # quickly compared
        operator = self.operators.setdefault(operator, operator)
        as_read = "doc_string" not in texts and all(getattr(node, field) for field in texts)
        found = operator, self._attributes_of(node), node.doc_string or None, as_read
        if all(attribute.type != _TENSOR for attribute in node.attribute):
            self.known[data] = found
        return found

    def _attributes_of(self, node: onnx.NodeProto) -> Store:
        if not node.attribute:
            return NO_ATTRIBUTES
        found = Store()
        for proto in node.attribute:
            data = proto.SerializeToString()
            attribute = self._attributes.get(data)
            if attribute is None:
                attribute = self._attribute(proto, data)
            found[attribute.name] = attribute
        if len(found) != len(node.attribute):
            raise RareError
        return found

    def _attribute(self, proto: onnx.AttributeProto, data: bytes) -> ir.Attr:
        if proto.ref_attr_name or (proto.type not in _SHARED and proto.type != _TENSOR):
            raise RareError
        if proto.type == _TENSOR:
            if not proto.HasField("t") or proto.t.data_location == onnx.TensorProto.EXTERNAL:
                raise RareError
            check_tensor(proto.t, ())
        attribute = ir.serde.deserialize_attribute(proto)
        if ir.serde.serialize_attribute(attribute).SerializeToString() != data:
            raise RareError
        if proto.type in _SHARED:
            self._attributes[data] = attribute
        return attribute


def check_known(message: onnx.NodeProto | onnx.TensorProto | onnx.ValueInfoProto, data: bytes) -> None:
    """Refuse a message that protobuf would write in other bytes, or with fields that ONNX has not or a faulty text.

    Raises:
        RareError: It has other bytes, or other fields.
        FileFormatError: A text is not text, or the message cannot be read.
    """
    check_text(type(message), data)
    message.DiscardUnknownFields()
    if message.SerializeToString() != data:
        raise RareError

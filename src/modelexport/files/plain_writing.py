"""Plain models (:mod:`modelexport.graph.plain`) as serialized ones: what was not changed is copied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
import onnx_ir as ir

from modelexport.files.plain_tensors import PlainTensor
from modelexport.files.serializing import without_nodes, write_tensor
from modelexport.files.wire import GRAPH, INFO, INITIALIZER, NODE, fields_between, length_delimited, number_of
from modelexport.graph.plain import PlainModel, PlainNode

_OF_NODES = number_of(onnx.NodeProto, "metadata_props")
_OF_TENSORS = number_of(onnx.TensorProto, "metadata_props")
_KEY, _TEXT = (number_of(onnx.StringStringEntryProto, name) for name in ("key", "value"))
_INFO_NAME = number_of(onnx.ValueInfoProto, "name")


def plain_bytes(model: PlainModel, tensors: Mapping[ir.Value, ir.TensorProtocol]) -> bytes:
    """Serialize a plain model; the same bytes as of :func:`modelexport.files.serializing.to_proto`.

    Args:
        tensors: Other tensors for some initializers.
    """
    header = ir.serde.serialize_model(without_nodes(model, _copies))
    rest = header.graph.SerializeToString()
    header.ClearField("graph")
    outside = header.SerializeToString()
    graph = b"".join(
        [
            *_nodes(model),
            fields_between(rest, NODE, INITIALIZER),
            *_initializers(model, tensors),
            fields_between(rest, INITIALIZER, INFO),
            *_types(model),
            fields_between(rest, INFO),
        ]
    )
    before, behind = fields_between(outside, 0, GRAPH), fields_between(outside, GRAPH)
    return b"".join([before, length_delimited(GRAPH, len(graph)), graph, behind])


def _copies(values: Iterable[ir.Value]) -> list[ir.Value]:
    return [
        ir.Value(
            name=v.name, type=v.type, shape=v.shape, doc_string=v.doc_string, metadata_props=dict(v.metadata_props)
        )
        for v in values
    ]


class _Properties:
    """Serializes the properties of messages, in a field with this number."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._heads: dict[tuple[str, int], bytes] = {}
        """A key and the length of a text to what is written before the text: few differ."""
        self._encoded: dict[int, bytes] = {}
        """By the identity of properties: nodes of one owner share them, and initializers of one origin."""

    def encoded(self, properties: Mapping[str, str]) -> bytes:
        """All properties of a node or tensor."""
        written = self._encoded.get(id(properties))
        if written is None:
            parts: list[bytes] = []
            for name, text in sorted(properties.items()):
                data = text.encode()
                head = name, len(data)
                parts += (self._heads.get(head) or self._head(*head), data)
            written = self._encoded[id(properties)] = b"".join(parts)
        return written

    def _head(self, name: str, length: int) -> bytes:
        key = name.encode()
        entry = length_delimited(_KEY, len(key)) + key + length_delimited(_TEXT, length)
        head = self._heads[name, length] = length_delimited(self._number, len(entry) + length) + entry
        return head


def _nodes(model: PlainModel) -> list[bytes]:
    encode = _Properties(_OF_NODES).encoded
    parts: list[bytes] = []
    for node in model.plain_nodes:
        written = encode(node.metadata_props)
        kept = node.serialized if node.name == node.kept_name else _rewritten(node)
        parts += (length_delimited(NODE, len(kept) + len(written)), kept, written)
    return parts


def _rewritten(node: PlainNode) -> bytes:
    """A node with another name, or with empty texts, which onnx_ir does not write."""
    proto = onnx.NodeProto.FromString(node.serialized)
    for field, text in {
        "name": node.name,
        "domain": node.domain,
        "overload": node.overload,
        "doc_string": node.doc_string,
    }.items():
        if text:
            setattr(proto, field, text)
        else:
            proto.ClearField(field)
    while proto.output and not proto.output[-1]:
        del proto.output[-1]
    written: bytes = proto.SerializeToString()
    return written


def _initializers(model: PlainModel, tensors: Mapping[ir.Value, ir.TensorProtocol]) -> list[bytes]:
    encode = _Properties(_OF_TENSORS).encoded
    parts: list[bytes] = []
    for value in model.graph.initializers.values():
        tensor = tensors.get(value, value.const_value)
        assert tensor is not None
        if type(tensor) is PlainTensor:
            kept, written = tensor.serialized, encode(value.metadata_props)
        else:
            tensor.name = value.name
            proto = onnx.TensorProto()
            write_tensor(proto, tensor, value)
            kept, written = proto.SerializeToString(), b""
        parts += (length_delimited(INITIALIZER, len(kept) + len(written)), kept, written)
    return parts


def _types(model: PlainModel) -> list[bytes]:
    """The types of values, in the order of the nodes; those of initializers and outputs are written elsewhere."""
    parts: list[bytes] = []
    for node in model.plain_nodes:
        for value in node.outputs:
            if (value.type is None and value.shape is None) or value.is_graph_output():
                continue
            name = value.name.encode()
            info = model.infos.get(name)
            if info is not None:
                field = length_delimited(_INFO_NAME, len(name))
                parts += (length_delimited(INFO, len(field) + len(name) + len(info)), field, name, info)
    return parts

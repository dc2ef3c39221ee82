"""``onnx_ir`` models as onnx's messages, and these as bytes with large tensors put in one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx
import onnx_ir as ir
from google.protobuf.message import Message

from modelexport.files.map_types import restore_map_types
from modelexport.files.protobuf_reading import LENGTH_DELIMITED, graphs_in
from modelexport.graph.bound_tensors import bind_tensors, detach_tensors
from modelexport.graph.nodes import nested_graphs
from modelexport.graph.properties import properties_of

Tensors = Mapping[ir.Value, ir.TensorProtocol]
Part = bytes | ir.TensorProtocol


def to_proto(model: ir.Model, tensors: Tensors) -> onnx.ModelProto:
    """Serialize a model with other tensors for some initializers; their properties are written to their tensors.

    No ``value_info`` is written for initializers: a tensor contains its type and shape, and ONNX Runtime's quantizers
    fail on initializers that have both.
    """
    before = detach_tensors(tensors)
    bind_tensors(tensors)
    try:
        proto: onnx.ModelProto = ir.serde.serialize_model(model)
    finally:
        detach_tensors(tensors)
        bind_tensors(before)
    _write_properties(model, proto)
    _complete(model.graph, proto.graph)
    for function, function_proto in zip(model.functions.values(), proto.functions, strict=True):
        _complete_nested(function, function_proto)
    restore_map_types(proto)
    return proto


def _write_properties(element: ir.Model | ir.Value, proto: onnx.ModelProto | onnx.TensorProto) -> None:
    properties = {entry.key: entry.value for entry in proto.metadata_props} | properties_of(element)
    del proto.metadata_props[:]
    for key, text in sorted(properties.items()):
        proto.metadata_props.add(key=key, value=text)


def _complete(graph: ir.Graph, proto: onnx.GraphProto) -> None:
    """Give the initializers of a graph, and of those nested in it, their properties, and nothing in ``value_info``."""
    for tensor in proto.initializer:
        _write_properties(graph.initializers[tensor.name], tensor)
    written = {tensor.name for tensor in proto.initializer}
    kept = [info for info in proto.value_info if info.name not in written]
    del proto.value_info[:]
    proto.value_info.extend(kept)
    for info in (*proto.input, *proto.output):
        if info.name in written:
            del info.metadata_props[:]
    _complete_nested(graph, proto)


def _complete_nested(nodes: ir.Graph | ir.Function, proto: onnx.GraphProto | onnx.FunctionProto) -> None:
    for node, node_proto in zip(nodes, proto.node, strict=True):
        if nested := nested_graphs(node):
            protos = [inside for attribute in node_proto.attribute for inside in graphs_in(attribute)]
            for inner, inside in zip(nested, protos, strict=True):
                _complete(inner, inside)


def serialized(model: onnx.ModelProto, data: Mapping[str, ir.TensorProtocol]) -> list[Part]:
    """The parts of a serialized model, in order: the bytes that protobuf would write if these initializers had data.

    The model is not usable afterwards.
    """
    if not data:
        return [model.SerializeToString()]
    tensors: list[Part] = []
    for tensor in model.graph.initializer:
        parts: list[Part] = [tensor.SerializeToString()]
        if tensor.name in data:
            parts = _with_field(tensor, "raw_data", _field(tensor, "raw_data", [data[tensor.name]]))
        tensors += _field(model.graph, "initializer", parts)
    return _with_field(model, "graph", _field(model, "graph", _with_field(model.graph, "initializer", tensors)))


def _with_field(message: Message, field: str, parts: Iterable[Part]) -> list[Part]:
    """A serialized message with these parts in place of a field."""
    number = message.DESCRIPTOR.fields_by_name[field].number
    behind = type(message)()
    behind.CopyFrom(message)
    for descriptor, _ in message.ListFields():
        if descriptor.number >= number:
            message.ClearField(descriptor.name)
        if descriptor.number <= number:
            behind.ClearField(descriptor.name)
    return [message.SerializeToString(), *parts, behind.SerializeToString()]


def _field(message: Message, field: str, parts: Sequence[Part]) -> list[Part]:
    """A serialized field with this content: its key, its length and the content."""
    key = message.DESCRIPTOR.fields_by_name[field].number << 3 | LENGTH_DELIMITED
    return [_varint(key) + _varint(size_of(parts)), *parts]


def size_of(parts: Iterable[Part]) -> int:
    """The bytes of parts of a file."""
    return sum(len(part) if isinstance(part, bytes) else part.nbytes for part in parts)


def _varint(number: int) -> bytes:
    """A number as protobuf writes it: seven bits a byte, the lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)

"""``onnx_ir`` models as onnx's messages, and these as bytes with large tensors put in one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import onnx
import onnx_ir as ir
from google.protobuf.message import Message

from modelexport.files.serialized import LENGTH_DELIMITED
from modelexport.files.tensors import graphs_in
from modelexport.graph.nodes import nested_graphs

Tensors = Mapping[ir.Value, ir.TensorProtocol]


class Data(Protocol):
    """The bytes of a tensor."""

    @property
    def nbytes(self) -> int: ...

    def tobytes(self) -> bytes: ...


Part = bytes | Data


def to_proto(model: ir.Model, tensors: Tensors) -> onnx.ModelProto:
    """Serialize a model with other tensors for some initializers; their properties are written to their tensors.

    No ``value_info`` is written for initializers: a tensor contains its type and shape, and ONNX Runtime's quantizers
    fail on initializers that have both.
    """
    graph = model.graph
    view = ir.GraphView(
        graph.inputs,
        graph.outputs,
        nodes=tuple(graph),
        initializers=[_with_tensor(value, tensor) for value, tensor in _tensors_of(graph, tensors).items()],
        doc_string=graph.doc_string,
        opset_imports=dict(graph.opset_imports),
        name=graph.name,
        metadata_props=dict(graph.metadata_props),
    )
    proto = ir.serde.serialize_model(
        ir.Model(
            view,  # type: ignore[arg-type]  # GraphView says that a model of a view can be serialized
            ir_version=model.ir_version,
            producer_name=model.producer_name,
            producer_version=model.producer_version,
            domain=model.domain,
            model_version=model.model_version,
            doc_string=model.doc_string,
            functions=tuple(model.functions.values()),
            metadata_props=dict(model.metadata_props),
            device_configurations=model.device_configurations,
        )
    )
    given = {value.name for value in graph.inputs}
    for value in graph.initializers.values():
        if value.const_value is None and value not in tensors and value.name not in given and value.type is not None:
            ir.serde.serialize_value_into(proto.graph.value_info.add(), value)
    _settle(graph, proto.graph, tensors)
    return proto


def _tensors_of(graph: ir.Graph, tensors: Tensors) -> dict[ir.Value, ir.TensorProtocol]:
    found = {value: tensors.get(value, value.const_value) for value in graph.initializers.values()}
    return {value: tensor for value, tensor in found.items() if tensor is not None}


def _with_tensor(value: ir.Value, tensor: ir.TensorProtocol) -> ir.Value:
    """A value that is serialized as an initializer and nothing else."""
    copy = ir.Value(name=value.name, const_value=tensor)
    copy.meta.update(value.meta)
    return copy


def _settle(graph: ir.Graph, proto: onnx.GraphProto, tensors: Tensors) -> None:
    """Write the properties of initializers to their tensors, and other tensors into nested graphs."""
    written = {tensor.name: tensor for tensor in proto.initializer}
    for value in graph.initializers.values():
        if (tensor := written.get(value.name or "")) is not None:
            properties = {entry.key: entry.value for entry in tensor.metadata_props} | dict(value.metadata_props)
            del tensor.metadata_props[:]
            for key, text in sorted(properties.items()):
                tensor.metadata_props.add(key=key, value=text)
    for info in (*proto.input, *proto.output):
        if info.name in written:
            del info.metadata_props[:]
    for node, node_proto in zip(graph, proto.node, strict=True):
        if nested := nested_graphs(node):
            protos = [inside for attribute in node_proto.attribute for inside in graphs_in(attribute)]
            for inner, inside in zip(nested, protos, strict=True):
                _settle_inside(inner, inside, tensors)


def _settle_inside(graph: ir.Graph, proto: onnx.GraphProto, tensors: Tensors) -> None:
    """The same for a nested graph, which was serialized with its own tensors."""
    written = {tensor.name: tensor for tensor in proto.initializer}
    for value in graph.initializers.values():
        if value in tensors and (tensor := written.get(value.name or "")) is not None:
            tensor.CopyFrom(ir.serde.serialize_tensor(tensors[value]))
            tensor.name = value.name or ""
    kept = [info for info in proto.value_info if info.name not in written]
    if len(kept) < len(proto.value_info):
        del proto.value_info[:]
        proto.value_info.extend(kept)
    _settle(graph, proto, tensors)


def serialized(model: onnx.ModelProto, data: Mapping[str, Data]) -> list[Part]:
    """The parts of a serialized model, in order: the bytes that protobuf would write if these initializers had data.

    The model is not usable afterwards.
    """
    if not data:
        return [model.SerializeToString()]
    tensors: list[Part] = []
    for tensor in model.graph.initializer:
        own = data.get(tensor.name)
        parts = (
            [tensor.SerializeToString()]
            if own is None
            else _with(tensor, "raw_data", _field(tensor, "raw_data", [own]))
        )
        tensors += _field(model.graph, "initializer", parts)
    return _with(model, "graph", _field(model, "graph", _with(model.graph, "initializer", tensors)))


def _with(message: Message, field: str, parts: Iterable[Part]) -> list[Part]:
    """A serialized message with these parts in place of a field."""
    number = message.DESCRIPTOR.fields_by_name[field].number
    behind = type(message)()
    behind.CopyFrom(message)
    for one, _ in message.ListFields():
        if one.number >= number:
            message.ClearField(one.name)
        if one.number <= number:
            behind.ClearField(one.name)
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

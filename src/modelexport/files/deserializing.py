"""Serialized models as ``onnx_ir`` models, made with onnx_ir's public constructors.

The same as :func:`onnx_ir.serde.deserialize_model`, in half of the time: each type and shape is decoded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir

from modelexport.graph.initializers import bind_tensors

_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def to_model(proto: onnx.ModelProto) -> ir.Model:
    """A model as ``onnx_ir`` represents it; its tensors refer to the serialized ones.

    onnx_ir itself reads what is rare: functions, nested graphs, annotations of quantization and of devices, and graphs
    with faults, for which it has messages.
    """
    graph = None if _is_rare(proto) else _Reader(proto.graph).read()
    if graph is None:
        return ir.serde.deserialize_model(proto)
    graph.opset_imports.update(ir.serde.deserialize_opset_import(proto.opset_import))
    return ir.Model(graph, **model_properties(proto))


def model_properties(proto: onnx.ModelProto) -> dict[str, Any]:
    """What a model says of itself, as arguments of :class:`onnx_ir.Model`."""
    return {
        "ir_version": proto.ir_version,
        "producer_name": _text(proto, "producer_name"),
        "producer_version": _text(proto, "producer_version"),
        "domain": _text(proto, "domain"),
        "model_version": proto.model_version if proto.HasField("model_version") else None,
        "doc_string": _text(proto, "doc_string"),
        "metadata_props": properties_of(proto.metadata_props),
    }


def _is_rare(proto: onnx.ModelProto) -> bool:
    return bool(proto.functions or proto.configuration or proto.graph.quantization_annotation)


def _text(proto: onnx.ModelProto | onnx.GraphProto | onnx.ValueInfoProto | onnx.NodeProto, name: str) -> str | None:
    return str(getattr(proto, name)) if proto.HasField(name) else None


def properties_of(entries: Iterable[onnx.StringStringEntryProto]) -> dict[str, str] | None:
    """Serialized properties as a mapping; ``None`` if there are none."""
    return {entry.key: entry.value for entry in entries} or None


def move_properties(tensor: ir.TensorProtocol, value: ir.Value) -> None:
    """Give an initializer the properties of its tensor, which loses them."""
    value.metadata_props.update(tensor.metadata_props)
    tensor.metadata_props.clear()
    if isinstance(tensor, ir.TensorProtoTensor):  # is written as it was read, with its old properties
        del tensor.raw.metadata_props[:]


class Form(NamedTuple):
    """What tensors of one type and shape have in common."""

    dtype: ir.DataType
    shape: ir.Shape
    size: int
    nbytes: int

    @classmethod
    def of(cls, data_type: int, dims: Sequence[int]) -> Form:
        """The form of a serialized tensor, whose type is known and whose elements have a fixed size."""
        dtype, size = ir.DataType(data_type), prod(dims)
        return cls(dtype, ir.Shape(dims, frozen=True), size, (dtype.bitwidth * size + 7) // 8)


class OfForm:
    """What a tensor says of its elements without decoding them.

    Its type and shape are writable in onnx_ir's protocol, but in none of onnx_ir's classes.
    """

    __slots__ = ()
    _form: Form

    @property
    def dtype(self) -> ir.DataType:
        return self._form.dtype

    @property
    def shape(self) -> ir.Shape:
        return self._form.shape

    @property
    def size(self) -> int:
        return self._form.size

    @property
    def nbytes(self) -> int:
        return self._form.nbytes


class SerializedTensor(OfForm, ir.TensorProtoTensor):  # type: ignore[misc,override]  # see OfForm
    """A tensor whose type and shape are decoded once, and not each time that it is asked for these or its size."""

    __slots__ = ("_form",)

    def __init__(self, proto: onnx.TensorProto, form: Form) -> None:
        super().__init__(proto)
        self._form = form


class _Reader:
    """Reads one graph without nested graphs."""

    def __init__(self, proto: onnx.GraphProto) -> None:
        self._proto = proto
        self._values: dict[str, ir.Value] = {}
        self._tensors: dict[ir.Value, ir.TensorProtocol] = {}
        self._infos = {info.name: info for info in proto.value_info}
        self._types: dict[bytes, tuple[ir.TypeProtocol | None, ir.Shape | None]] = {}
        """A serialized type to what it holds. Values share shapes, which are immutable, and not types."""
        self._forms: dict[tuple[int, tuple[int, ...]], Form] = {}
        """The type and sizes of a tensor to its form."""

    def read(self) -> ir.Graph | None:
        """The graph; ``None`` if it has faults or nested graphs."""
        proto, values = self._proto, self._values
        inputs = [ir.serde.deserialize_value_info_proto(info, None) for info in proto.input]
        values.update((value.name or "", value) for value in inputs)
        initializers = [self._initializer(tensor) for tensor in proto.initializer]
        bind_tensors(self._tensors)
        outputs = [self._outputs(node) for node in proto.node]
        if None in outputs or "" in values:
            return None
        nodes: list[ir.Node] = []
        for one, made in zip(proto.node, outputs, strict=True):
            node = self._node(one, made or [])
            if node is None:
                return None
            nodes.append(node)
        if any(info.name not in values for info in proto.output):
            return None
        return ir.Graph(
            inputs,
            [ir.serde.deserialize_value_info_proto(info, values[info.name]) for info in proto.output],
            nodes=nodes,
            initializers=initializers,
            doc_string=_text(proto, "doc_string"),
            name=_text(proto, "name"),
            metadata_props=properties_of(proto.metadata_props),
        )

    def _initializer(self, proto: onnx.TensorProto) -> ir.Value:
        tensor, name = self._tensor(proto), proto.name
        value = self._values.get(name)
        if value is not None:  # the default of an input
            self._tensors[value] = tensor
            return value
        value = self._value(name)
        if name not in self._infos:
            value.type = ir.TensorType(tensor.dtype)
            value.shape = tensor.shape  # type: ignore[assignment]  # a Shape in every class, a protocol in the type
        self._tensors[value] = tensor
        self._values[name] = value
        return value

    def _tensor(self, proto: onnx.TensorProto) -> ir.TensorProtocol:
        if proto.data_location == onnx.TensorProto.EXTERNAL or proto.data_type == onnx.TensorProto.STRING:
            return ir.serde.deserialize_tensor(proto)
        key = proto.data_type, tuple(proto.dims)
        if key not in self._forms:
            self._forms[key] = Form.of(*key)
        return SerializedTensor(proto, self._forms[key])

    def _outputs(self, node: onnx.NodeProto) -> list[ir.Value] | None:
        """The values that a node makes; ``None`` if another one makes one of them as well."""
        values = self._values
        made = []
        for name in node.output:
            value = self._value(name)
            if name:
                if name in values:
                    return None
                values[name] = value
            made.append(value)
        return made

    def _value(self, name: str) -> ir.Value:
        info = self._infos.get(name) if name else None
        if info is None:
            return ir.Value(name=name)
        kind, shape = self._type(info.type)
        properties = properties_of(info.metadata_props) if info.metadata_props else None
        return ir.Value(
            name=name, type=kind, shape=shape, doc_string=_text(info, "doc_string"), metadata_props=properties
        )

    def _type(self, proto: onnx.TypeProto) -> tuple[ir.TypeProtocol | None, ir.Shape | None]:
        key = proto.SerializeToString()
        known = self._types.get(key)
        if known is None:
            shape = ir.serde.deserialize_type_proto_for_shape(proto)
            known = self._types[key] = ir.serde.deserialize_type_proto_for_type(proto), shape
            return known
        kind, shape = known
        if type(kind) is ir.TensorType:
            return ir.TensorType(kind.dtype, denotation=kind.denotation), shape
        return ir.serde.deserialize_type_proto_for_type(proto), shape

    def _node(self, proto: onnx.NodeProto, outputs: list[ir.Value]) -> ir.Node | None:
        """A node; ``None`` if it is one for onnx_ir itself."""
        try:
            inputs = [self._values[name] if name else None for name in proto.input]
        except KeyError:  # nothing makes it
            return None
        attributes = proto.attribute
        if proto.device_configurations or (attributes and any(one.type in _GRAPHS for one in attributes)):
            return None
        properties = proto.metadata_props
        return ir.Node(
            proto.domain,
            proto.op_type,
            inputs,
            [ir.serde.deserialize_attribute(one) for one in attributes] if attributes else (),
            overload=proto.overload,
            outputs=outputs,
            name=proto.name,
            doc_string=proto.doc_string if proto.HasField("doc_string") else None,
            metadata_props={entry.key: entry.value for entry in properties} if properties else None,
        )

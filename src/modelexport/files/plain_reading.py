"""Serialized models as plain models (:mod:`modelexport.graph.plain`), if there is nothing rare in them."""

from __future__ import annotations

from collections.abc import Collection

import onnx
import onnx_ir as ir

from modelexport.errors import FileFormatError
from modelexport.files.deserializing import Form, SerializedTensor, model_properties, move_properties, properties_of
from modelexport.files.order import check_opsets
from modelexport.files.tensors import check_tensor
from modelexport.graph.plain import UNKNOWN, Kind, PlainGraph, PlainModel, PlainNode, PlainValue, Store

_TEXTS = (onnx.AttributeProto.FLOAT, onnx.AttributeProto.INT, onnx.AttributeProto.STRING)
_LISTS = (onnx.AttributeProto.FLOATS, onnx.AttributeProto.INTS, onnx.AttributeProto.STRINGS)
_SHARED = frozenset((*_TEXTS, *_LISTS))
"""Attributes that are equal if they are serialized alike."""
_TENSOR = onnx.AttributeProto.TENSOR
_RARE_TYPES = (onnx.TensorProto.STRING, onnx.TensorProto.FLOAT6E2M3, onnx.TensorProto.FLOAT6E3M2)
"""Elements that onnx_ir represents in another way, or checks when it writes them."""
_NO_ATTRIBUTES = Store()


class _RareError(Exception):
    """There is something in the model that a plain one cannot have, or a fault."""


def to_plain(proto: onnx.ModelProto, elsewhere: Collection[str]) -> PlainModel | None:
    """A model that is not rewired; ``None`` if it has something rare or a fault, which the other reader names.

    Rare are functions, nested graphs, nodes that are not sorted, weights in other files, and whatever onnx_ir would
    write in other bytes than it has. So a plain model needs none of the checks of untrusted files but those made here,
    and what is written of it is what onnx_ir would write.

    Args:
        elsewhere: Names of initializers whose data was taken out.
    """
    graph = proto.graph
    if proto.functions or proto.configuration or proto.training_info:
        return None
    if graph.quantization_annotation or graph.sparse_initializer:
        return None
    check_opsets(proto)
    try:
        reader = _Reader(proto, elsewhere)
        view = reader.read()
    except (_RareError, KeyError, FileFormatError, ir.serde.SerdeError, ValueError, TypeError):
        return None
    # From here on the model is changed: the other reader would not find what was in it.
    for value in reader.described:
        assert value.const_value is not None
        move_properties(value.const_value, value)
    proto.DiscardUnknownFields()
    return PlainModel(view, reader.nodes, proto, **model_properties(proto))


class _Reader:
    def __init__(self, proto: onnx.ModelProto, elsewhere: Collection[str]) -> None:
        self._model, self._proto, self._elsewhere = proto, proto.graph, elsewhere
        self._values: dict[str, PlainValue] = {}
        self._kinds: dict[bytes, Kind] = {}
        self._forms: dict[tuple[int, tuple[int, ...], int], tuple[Form, Kind]] = {}
        """Type, sizes and number of bytes of tensors that were checked."""
        self._attributes: dict[bytes, ir.Attr] = {}
        self.described: list[PlainValue] = []
        """Initializers whose tensors have properties."""

    def read(self) -> PlainGraph:
        proto = self._proto
        self._infos = {info.name: info for info in proto.value_info}
        inputs = [self._input(info) for info in proto.input]
        initializers = [self._initializer(tensor) for tensor in proto.initializer]
        if len(self._values) < len(inputs) + len(initializers):
            raise _RareError  # two values of one name
        self.nodes = self._read_nodes()
        if "" in self._values:
            raise _RareError
        outputs = [self._output(info) for info in proto.output]
        return PlainGraph(
            inputs,
            outputs,
            nodes=self.nodes,
            initializers=initializers,
            doc_string=proto.doc_string if proto.HasField("doc_string") else None,
            opset_imports=ir.serde.deserialize_opset_import(self._model.opset_import),
            name=proto.name if proto.HasField("name") else None,
            metadata_props=properties_of(proto.metadata_props) or {},
        )

    def _input(self, info: onnx.ValueInfoProto) -> PlainValue:
        value = PlainValue(info.name, UNKNOWN, None)
        value.role = "input"
        self._describe(value, info)
        self._values[info.name] = value
        return value

    def _output(self, info: onnx.ValueInfoProto) -> PlainValue:
        value = self._values[info.name]
        if value.made_by is None or value.leaves:
            raise _RareError
        value.leaves = True
        self._describe(value, info)
        return value

    def _describe(self, value: PlainValue, info: onnx.ValueInfoProto) -> None:
        """Set what an input or output of the graph says of its value."""
        said = ir.Value(name=value.name, type=value.type, shape=value.shape)
        ir.serde.deserialize_value_info_proto(info, said)
        value.type, value.shape, value.doc_string = said.type, said.shape, said.doc_string
        value.dtype = said.dtype
        value.metadata_props = dict(said.metadata_props)

    def _initializer(self, proto: onnx.TensorProto) -> PlainValue:
        name, data_type, dims = proto.name, proto.data_type, tuple(proto.dims)
        length = len(proto.raw_data)
        known = self._forms.get((data_type, dims, length)) if length else None
        if proto.data_location == onnx.TensorProto.EXTERNAL:
            raise _RareError
        if known is None:
            check_tensor(proto, self._elsewhere)
            if data_type in _RARE_TYPES:
                raise _RareError
            form = Form.of(data_type, dims)
            known = self._forms[data_type, dims, length] = form, (form.dtype, ir.TensorType(form.dtype), form.shape)
        form, kind = known
        info = self._infos.get(name)
        if info is not None:
            kind = self._kind(info)
        value = PlainValue(name, kind, None, SerializedTensor(proto, form))
        value.role = "initializer"
        value.metadata_props = (properties_of(info.metadata_props) if info is not None else None) or {}
        if proto.metadata_props:
            self.described.append(value)
        self._values[name] = value
        return value

    def _kind(self, info: onnx.ValueInfoProto) -> Kind:
        """The type of a value."""
        data = info.type.SerializeToString()
        kind = self._kinds.get(data)
        if kind is None:
            value = ir.serde.deserialize_value_info_proto(info, None)
            if ir.serde.serialize_value(value).type.SerializeToString() != data:
                raise _RareError
            kind = self._kinds[data] = value.dtype, value.type, value.shape
        return kind

    def _read_nodes(self) -> list[PlainNode]:
        operators: dict[tuple[str, str, str], tuple[str, str, str]] = {}
        nodes = [self._node(proto, operators) for proto in self._proto.node]
        if any(domain == "ai.onnx" for domain, _, _ in operators):
            raise _RareError  # another name of ""
        return nodes

    def _node(self, proto: onnx.NodeProto, operators: dict[tuple[str, str, str], tuple[str, str, str]]) -> PlainNode:
        values, infos = self._values, self._infos
        operator = proto.domain, proto.op_type, proto.overload
        operator = operators.setdefault(operator, operator)
        given, entries = proto.attribute, proto.metadata_props
        attributes = self._attributes_of(proto) if given else _NO_ATTRIBUTES
        properties = {entry.key: entry.value for entry in entries} if entries else {}
        node = PlainNode(operator, proto.name, attributes, properties, proto.doc_string or None)
        inputs: list[PlainValue | None] = []
        for index, name in enumerate(proto.input):
            if name:
                value = values[name]
                value.users.append((node, index))
                inputs.append(value)
            else:
                inputs.append(None)
        outputs = []
        for name in proto.output:
            info = infos.get(name) if name else None
            if info is None:
                value = PlainValue(name, UNKNOWN, node)
            else:
                if info.doc_string or info.metadata_props:
                    raise _RareError
                value = PlainValue(name, self._kind(info), node)
            outputs.append(value)
            if name:
                if name in values:
                    raise _RareError  # two values of one name
                values[name] = value
        if not outputs or proto.device_configurations:
            raise _RareError
        node.inputs, node.outputs = inputs, outputs
        return node

    def _attributes_of(self, node: onnx.NodeProto) -> Store:
        found = Store()
        for proto in node.attribute:
            data = proto.SerializeToString()
            attribute = self._attributes.get(data)
            if attribute is None:
                attribute = self._attribute(proto, data)
            found[attribute.name] = attribute
        if len(found) != len(node.attribute):
            raise _RareError
        return found

    def _attribute(self, proto: onnx.AttributeProto, data: bytes) -> ir.Attr:
        if proto.ref_attr_name or (proto.type not in _SHARED and proto.type != _TENSOR):
            raise _RareError
        if proto.type == _TENSOR:
            if not proto.HasField("t") or proto.t.data_location == onnx.TensorProto.EXTERNAL:
                raise _RareError
            check_tensor(proto.t, ())
        attribute = ir.serde.deserialize_attribute(proto)
        if ir.serde.serialize_attribute(attribute).SerializeToString() != data:
            raise _RareError
        if proto.type in _SHARED:
            self._attributes[data] = attribute
        return attribute

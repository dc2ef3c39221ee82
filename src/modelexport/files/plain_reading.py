"""Serialized models as plain models (:mod:`modelexport.graph.plain`), if there is nothing rare in them.

Nodes, initializers and types are read from the bytes of the file: a Python object for each message, as protobuf makes
them, takes twice as long. What many of them have alike (an operator with its attributes, properties, a type) is read
once, by protobuf, which also checks it. Bytes that protobuf would write in another way are left to the other reader.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import onnx
import onnx_ir as ir
from google.protobuf import message

from modelexport.errors import FileFormatError
from modelexport.files.deserializing import Form, model_properties, properties_of
from modelexport.files.order import check_opsets
from modelexport.files.plain_messages import Place, split_messages
from modelexport.files.plain_operations import Operations, RareError, check_known
from modelexport.files.plain_tensors import PlainTensor
from modelexport.files.tensors import check_kept, check_tensor
from modelexport.files.wire import VARINT, key_of, read_length
from modelexport.graph.plain import (
    NOTHING,
    UNKNOWN,
    Kind,
    PlainGraph,
    PlainModel,
    PlainNode,
    PlainValue,
    Store,
)

_FLAT = (None, "tensor_type")
"""Types without types in them: of these, protobuf reads fewer levels in a file than in a type that is parsed alone."""
_RARE_TYPES = (onnx.TensorProto.STRING, onnx.TensorProto.FLOAT6E2M3, onnx.TensorProto.FLOAT6E3M2)
"""Elements that onnx_ir represents in another way, or checks when it writes them."""

# What fields begin with: those of a node, of a tensor, of the type of a value, and of a property.
_INPUT, _OUTPUT, _NAME, _OPERATOR, _OVERLOAD = (
    key_of(onnx.NodeProto, name)[0] for name in ("input", "output", "name", "op_type", "overload")
)
_NODE_PROPERTIES = key_of(onnx.NodeProto, "metadata_props")
_DIMS, _DATA_TYPE = (key_of(onnx.TensorProto, name, VARINT)[0] for name in ("dims", "data_type"))
_FLOATS, _TENSOR_NAME, _RAW, _TENSOR_DOC = (
    key_of(onnx.TensorProto, name)[0] for name in ("float_data", "name", "raw_data", "doc_string")
)
_TENSOR_PROPERTIES = key_of(onnx.TensorProto, "metadata_props")
_INFO_NAME, _INFO_TYPE = (key_of(onnx.ValueInfoProto, name)[0] for name in ("name", "type"))
_INFO_PROPERTIES = key_of(onnx.ValueInfoProto, "metadata_props")
_KEY, _TEXT = (key_of(onnx.StringStringEntryProto, name)[0] for name in ("key", "value"))

_NUMBERS, _TAKEN_OUT = -1, -2
"""In place of the number of a tensor's bytes: it has none, or they were taken out."""


def to_plain(data: mmap.mmap | bytes) -> tuple[PlainModel, dict[str, range]] | None:
    """A serialized model as one that is not rewired, and the places of the bytes of its large initializers.

    ``None`` if it has something rare or a fault, which the other reader names. Rare are functions, nested graphs, nodes
    that are not sorted, weights in other files, and whatever onnx_ir would write in other bytes than it has. So a plain
    model needs none of the checks of untrusted files but those made here, and what is written of it is what onnx_ir
    would write.
    """
    try:
        reader = _Reader(data)
        view = reader.read()
    except (RareError, LookupError, FileFormatError, ir.serde.SerdeError, ValueError, TypeError, message.DecodeError):
        return None
    model = PlainModel(view, reader.nodes, reader.infos, **model_properties(reader.model))
    return model, reader.weights


class _Reader:
    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._messages = split_messages(data)
        self._data, self.model, self.weights = self._messages.data, self._messages.model, self._messages.weights
        self._values: dict[bytes, PlainValue] = {}
        self._kinds: dict[bytes, Kind] = {}
        self._forms: dict[tuple[bytes, int], tuple[Form, Kind]] = {}
        """What tensors that were checked begin with, and the number of their bytes."""
        self._head = b""
        """What the last tensor begins with: many have the same sizes and type."""
        self._operations = Operations()
        self._properties: dict[bytes, dict[str, str]] = {}
        self.infos: dict[bytes, bytes] = {}
        """The names of values to what is said of them."""

    def read(self) -> PlainGraph:
        model, proto = self.model, self.model.graph
        if model.functions or model.configuration or proto.quantization_annotation:
            raise RareError
        check_kept(model)
        check_opsets(model)
        self._note(self._messages.infos)
        inputs = [self._input(info) for info in proto.input]
        initializers = list(self._initializers(self._messages.tensors))
        if len(self._values) < len(inputs) + len(initializers):
            raise RareError  # two values of one name
        self.nodes = list(self._nodes(self._messages.nodes))
        if b"" in self._values or any(domain == "ai.onnx" for domain, _, _ in self._operations.operators):
            raise RareError  # a value without a name; another name of the domain ""
        outputs = [self._output(info) for info in proto.output]
        self._check_others()
        return PlainGraph(
            inputs,
            outputs,
            nodes=self.nodes,
            initializers=initializers,
            doc_string=proto.doc_string if proto.HasField("doc_string") else None,
            opset_imports=ir.serde.deserialize_opset_import(model.opset_import),
            name=proto.name if proto.HasField("name") else None,
            metadata_props=properties_of(proto.metadata_props) or {},
        )

    def _input(self, info: onnx.ValueInfoProto) -> PlainValue:
        value = PlainValue(info.name, UNKNOWN, None, role="input")
        self._describe(value, info)
        self._values[info.name.encode()] = value
        return value

    def _output(self, info: onnx.ValueInfoProto) -> PlainValue:
        value = self._values[info.name.encode()]
        if value.made_by is None or value.leaves:
            raise RareError
        value.leaves = True
        self._describe(value, info)
        return value

    def _describe(self, value: PlainValue, info: onnx.ValueInfoProto) -> None:
        """Set what an input or output of the graph says of its value."""
        said = ir.Value(name=value.name, type=value.type, shape=value.shape)
        ir.serde.deserialize_value_info_proto(info, said)
        value.kind, value.doc_string = (said.dtype, said.type, said.shape), said.doc_string
        value.metadata_props = dict(said.metadata_props)

    def _note(self, infos: Sequence[Place]) -> None:
        """Note what is said of values, which is read for those that there are."""
        data, found = self._data, self.infos
        for begin, stop in infos:
            start, name = begin, b""
            if data[start] == _INFO_NAME:
                size, start = data[start + 1], start + 2
                if size > 0x7F:
                    size, start = read_length(data, start - 1)
                name = data[start : start + size]
                start += size
            if start > stop:
                raise RareError
            found[name] = data[start:stop]
        if len(found) < len(infos):
            raise RareError  # two types of one value

    def _check_others(self) -> None:
        """Check what is said of inputs once more, and of values that there are not."""
        given = {info.name.encode() for info in self.model.graph.input}
        others = self.infos.keys() - self._values.keys() | self.infos.keys() & given
        b"\n".join(others).decode()
        for info in {self.infos[name] for name in others}:
            self._said(info)

    def _initializers(self, places: Sequence[Place]) -> Iterator[PlainValue]:
        """Read tensors: sizes, type, numbers that are not bytes, name, bytes, doc string, properties."""
        data, values, infos, kinds, forms = self._data, self._values, self.infos, self._kinds, self._forms
        weights = self.weights
        for start, stop in places:
            head = self._head
            position = start + len(head)
            if not data.startswith(head, start) or data[position] != _TENSOR_NAME:
                head, position = self._beginning(start, stop)
            size, position = data[position + 1], position + 2
            if size > 0x7F:
                size, position = read_length(data, position - 1)
            name = data[position : position + size]
            position += size
            length = _NUMBERS
            if data[position] == _RAW and position < stop:
                length, position = read_length(data, position + 1)
                position += length
            doc_string = ""
            if data[position] == _TENSOR_DOC and position < stop:
                size, position = read_length(data, position + 1)
                doc_string = data[position : position + size].decode()
                position += size
            properties = NOTHING if position == stop else _properties(_TENSOR_PROPERTIES, data, position, stop)
            tensor = data[start:position]
            text = name.decode()
            if length == _NUMBERS and text in weights:
                length = _TAKEN_OUT
            form, kind = forms.get((head, length)) or self._form(head, length, tensor)
            info, said = infos.get(name), NOTHING
            if info is not None:
                known = kinds.get(info)
                if known is not None:
                    kind = known
                else:
                    kind, said = self._said(info)
            value = PlainValue(text, kind, None, PlainTensor(text, doc_string, tensor, form), "initializer")
            if said or properties:
                value.metadata_props = {**said, **properties}
            values[name] = value
            yield value

    def _beginning(self, start: int, stop: int) -> tuple[bytes, int]:
        """What a tensor begins with, up to its numbers if they are not bytes, and where its name is."""
        data, position = self._data, start
        while (key := data[position]) in (_DIMS, _DATA_TYPE):
            position += 2
            if data[position - 1] > 0x7F:
                _, position = read_length(data, position - 1)
        if key == _FLOATS:  # their number tells whether there are enough
            size, position = data[position + 1], position + 2
            if size > 0x7F:
                size, position = read_length(data, position - 1)
            head = data[start:position]
            position += size
        else:
            while position < stop and data[position] != _TENSOR_NAME:
                size, position = read_length(data, position + 1)
                position += size
            head = self._head = data[start:position]
        if data[position] != _TENSOR_NAME:
            raise RareError
        return head, position

    def _form(self, head: bytes, length: int, tensor: bytes) -> tuple[Form, Kind]:
        """The form of a tensor and the type of its value, if the tensor has the data that they require."""
        proto = onnx.TensorProto.FromString(tensor)
        check_known(proto, tensor)
        if proto.data_type in _RARE_TYPES or proto.data_location == onnx.TensorProto.EXTERNAL:
            raise RareError
        check_tensor(proto, self.weights)
        form = Form.of(proto.data_type, tuple(proto.dims))
        known = self._forms[head, length] = form, (form.dtype, ir.TensorType(form.dtype), form.shape)
        return known

    def _said(self, info: bytes) -> tuple[Kind, dict[str, str]]:
        """The type and the properties of a value."""
        position = 0
        if info[:1] == bytes([_INFO_TYPE]):
            size, position = read_length(info, 1)
            position += size
        return self._kind(info[:position]), _properties(_INFO_PROPERTIES, info, position, len(info))

    def _kind(self, data: bytes) -> Kind:
        """The type of a value."""
        kind = self._kinds.get(data)
        if kind is None:
            info = onnx.ValueInfoProto.FromString(data)
            check_known(info, data)
            if info.type.WhichOneof("value") not in _FLAT:
                raise RareError
            value = ir.serde.deserialize_value_info_proto(info, None)
            if ir.serde.serialize_value(value).type.SerializeToString() != info.type.SerializeToString():
                raise RareError
            kind = self._kinds[data] = value.dtype, value.type, value.shape
        return kind

    def _nodes(self, places: Sequence[Place]) -> Iterator[PlainNode]:
        """Read nodes: inputs, outputs, name, operator, attributes, doc string, domain, overload, properties."""
        data, values, infos, kinds = self._data, self._values, self.infos, self._kinds
        operations, known, read = self._operations.known, self._properties, self._operations.read
        for start, stop in places:
            position = start
            node = PlainNode()
            inputs: list[PlainValue | None] = []
            while data[position] == _INPUT:
                size, position = data[position + 1], position + 2
                if size > 0x7F:
                    size, position = read_length(data, position - 1)
                if size:
                    value = values[data[position : position + size]]
                    inputs.append(value)
                    users = value.users
                    if not users:
                        value.users = node
                    elif isinstance(users, list):
                        users.append(node)
                    elif isinstance(users, PlainNode):
                        value.users = [users, node]
                    position += size
                else:
                    inputs.append(None)
            outputs: list[PlainValue] = []
            while data[position] == _OUTPUT:
                size, position = data[position + 1], position + 2
                if size > 0x7F:
                    size, position = read_length(data, position - 1)
                made = data[position : position + size]
                position += size
                info = infos.get(made)
                kind = UNKNOWN if info is None or not size else kinds.get(info) or self._only_kind(info)
                value = PlainValue(made.decode(), kind, node)
                outputs.append(value)
                if size and values.setdefault(made, value) is not value:
                    raise RareError  # two values of one name
            named = True
            if data[position] == _NAME:
                size, position = data[position + 1], position + 2
                if size > 0x7F:
                    size, position = read_length(data, position - 1)
                node.name, named = data[position : position + size].decode(), size > 0
                position += size
            begin = position
            while _OPERATOR <= data[position] <= _OVERLOAD and position < stop:
                size, position = data[position + 1], position + 2
                if size > 0x7F:
                    size, position = read_length(data, position - 1)
                position += size
            operation = data[begin:position]
            node.operator, attributes, node.doc_string, as_read = operations.get(operation) or read(operation)
            if attributes:
                node.attributes = Store(attributes)
            if position < stop:
                said = data[position:stop]
                properties = known.get(said)
                if properties is None:
                    properties = known[said] = _properties(_NODE_PROPERTIES, data, position, stop)
                node.metadata_props = properties
            elif position > stop:
                raise RareError
            if not outputs:
                raise RareError
            node.serialized = data[start:position]
            if as_read and named and outputs[-1].name:
                node.kept_name = node.name
            node.inputs, node.outputs = inputs, outputs
            yield node

    def _only_kind(self, info: bytes) -> Kind:
        """The type of a value of which nothing else is said."""
        kind, properties = self._said(info)
        if properties:
            raise RareError
        return kind


def _properties(field: bytes, data: bytes, position: int, stop: int) -> dict[str, str]:
    """The properties that a message ends with."""
    found = {}
    while position < stop:
        if not data.startswith(field, position):
            raise RareError
        position += len(field)
        size, position = data[position], position + 1
        if size > 0x7F:
            size, position = read_length(data, position - 1)
        end = position + size
        if data[position] != _KEY:
            raise RareError
        size, position = data[position + 1], position + 2
        if size > 0x7F:
            size, position = read_length(data, position - 1)
        key = data[position : position + size].decode()
        position += size
        if data[position] != _TEXT:
            raise RareError
        size, position = data[position + 1], position + 2
        if size > 0x7F:
            size, position = read_length(data, position - 1)
        found[key] = data[position : position + size].decode()
        position += size
        if position != end:
            raise RareError
    if position != stop:
        raise RareError
    return found

"""ONNX files as onnx's own message, checked before protobuf reads them. Does not import ``onnx_ir``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import onnx
from google.protobuf import descriptor_pb2, descriptor_pool, message
from google.protobuf.message_factory import GetMessageClass

from modelexport.core.limits import MOST_FIELDS, PROTO_BYTES
from modelexport.errors import FileFormatError
from modelexport.files.regular_files import read_regular

LENGTH_DELIMITED = 2
"""Protobuf's wire type of texts, bytes and messages."""
_SIZES = {0: 0, 1: 8, 5: 4}
"""The other wire types to the bytes of their values; a varint is read before it is known where it ends."""
_GRAPH = onnx.ModelProto.DESCRIPTOR.fields_by_name["graph"].number << 3 | LENGTH_DELIMITED


def read_serialized(path: Path) -> onnx.ModelProto:
    """A model as it is in its file, with the weights in it; those in other files are not read.

    Raises:
        FileFormatError: It is not a regular file, has more bytes or fields than are read, is not an ONNX file, or has
            texts that are not UTF-8.
    """
    if path.is_file() and (size := path.stat().st_size) > PROTO_BYTES:
        raise FileFormatError(
            f"{path} has {size:,} bytes, and at most {PROTO_BYTES:,} are read: keep its weights in a file beside it"
        )
    data = read_regular(path, PROTO_BYTES)
    try:
        _check_fields(data)
        model: onnx.ModelProto = onnx.ModelProto.FromString(data)
    except (LookupError, ValueError, message.DecodeError) as error:
        raise FileFormatError(f"{path} is not an ONNX file{_reason(data, error)}") from error
    try:
        _strict_model().FromString(data)  # protobuf lets any bytes pass as texts of ONNX's messages
    except message.DecodeError as error:
        text = "the model has names or properties that are not text: the file is damaged"
        raise FileFormatError(f"{path}: {text}") from error
    return model


_OTHER_FILES = {
    b"PK\3\4": "a ZIP archive, as torch.save writes",
    b"\x89HDF": "an HDF5 file, as Keras writes",
    b"GGUF": "a GGUF file",
    b"\x80": "a pickle",
}
"""How files begin that people take for ONNX files."""


def _reason(data: bytes, error: Exception) -> str:
    for begin, what in _OTHER_FILES.items():
        if data.startswith(begin):
            return f": it is {what}"
    if (first := data[:40].splitlines()[0].decode("latin1")).isascii() and first.isprintable():
        return f": it is text that begins with {first!r}"
    if isinstance(error, KeyError):
        return ", or damaged: its bytes are not a protobuf message"
    return f", or damaged: {error if isinstance(error, ValueError) else 'it was not written or copied completely'}"


def _check_fields(data: bytes) -> None:
    """Refuse models with more fields, those of their graphs included, than protobuf should make objects of.

    Raises:
        ValueError, LookupError: There are more, or protobuf would not read them either.
    """
    graphs = []
    left = MOST_FIELDS
    for key, begin, end in _fields(data, 0, len(data), left):
        left -= 1
        if key == _GRAPH:
            graphs.append((begin, end))
    for begin, end in graphs:
        left -= sum(1 for _ in _fields(data, begin, end, left))


def _fields(data: bytes, position: int, stop: int, most: int) -> Iterator[tuple[int, int, int]]:
    """Each field of a message: its key, and where its value begins and ends."""
    while position < stop:
        if not most:
            raise ValueError(f"more than {MOST_FIELDS:,} fields")
        most -= 1
        key, begin = _varint(data, position)
        kind = key & 7
        value, after = _varint(data, begin) if kind in (0, LENGTH_DELIMITED) else (0, begin)
        position = after + (value if kind == LENGTH_DELIMITED else _SIZES[kind])
        yield key, after, position


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A number (seven bits a byte, the lowest first), and the position after it."""
    number = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise ValueError("a number of more than 64 bits")


@cache
def _strict_model() -> Any:
    """ONNX's model as proto3 has it, whose parser checks text: in a tenth of the time that Python would take."""
    file = descriptor_pb2.FileDescriptorProto()
    onnx.ModelProto.DESCRIPTOR.file.CopyToProto(file)
    file.syntax = "proto3"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName(onnx.ModelProto.DESCRIPTOR.full_name))


def graphs_in(attribute: onnx.AttributeProto) -> Sequence[onnx.GraphProto]:
    """The graphs that an attribute holds."""
    return (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs


def with_nested(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes, each followed by the nodes of its nested graphs."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in graphs_in(attribute):
                yield from with_nested(graph.node)


def serialized_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node, those of nested graphs and functions included."""
    for graph in (model.graph, *model.functions):
        yield from with_nested(graph.node)


def serialized_graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """The graph of a model, and all graphs nested in it and in functions."""
    yield model.graph
    for node in serialized_nodes(model):
        for attribute in node.attribute:
            yield from graphs_in(attribute)


def serialized_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Initializers and the tensors of attributes, those of nested graphs and functions included."""
    for graph in serialized_graphs(model):
        yield from graph.initializer
    for node in serialized_nodes(model):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors

"""Where the nodes, initializers and types of a serialized model are, found in one pass without protobuf."""

from __future__ import annotations

import mmap
from typing import NamedTuple

import onnx

from modelexport.core.limits import FIELDS, PROTO_BYTES
from modelexport.files.plain_operations import RareError
from modelexport.files.text_fields import parse_model
from modelexport.files.wire import GRAPH, SMALL, fields, key_of, length_delimited, read_length, without_data

_NODE, _INITIALIZER, _INFO = (key_of(onnx.GraphProto, name)[0] for name in ("node", "initializer", "value_info"))

Place = tuple[int, int]
"""Where a message begins and ends."""


class Messages(NamedTuple):
    """A serialized model, in parts."""

    data: bytes
    """The graph, without the bytes of large initializers; a byte that no field begins with is behind it."""
    nodes: list[Place]
    tensors: list[Place]
    infos: list[Place]
    model: onnx.ModelProto
    """Everything else."""
    weights: dict[str, range]
    """The names of large initializers to the places of their bytes in the file."""


def split_messages(data: mmap.mmap | bytes) -> Messages:
    """Split a serialized model.

    Raises:
        RareError: It has several graphs, more fields than are read, or keys or lengths with more bytes than they need.
        ValueError, IndexError, FileFormatError, google.protobuf.message.DecodeError: It has a fault.
    """
    graph: range | None = None
    others: list[bytes] = []
    for number, start, value in fields(data, range(len(data))):
        if number != GRAPH:
            others.append(data[start : value.stop])
        elif graph is None and data[start : value.start] == length_delimited(GRAPH, len(value)):
            graph = value
        else:
            raise RareError
    if graph is None:
        raise RareError
    nodes, tensors, infos = list[Place](), list[Place](), list[Place]()
    found = {_NODE: nodes, _INITIALIZER: tensors, _INFO: infos}
    weights: dict[str, range] = {}
    parts, rest = list[bytes](), list[bytes]()
    position = copied = removed = graph.start
    stop = graph.stop
    for _ in range(FIELDS):
        if position >= stop:
            break
        messages = found.get(data[position])
        if messages is None:
            start = position
            position = next(fields(data, range(position, stop)))[2].stop
            rest.append(data[start:position])
            continue
        size, start = data[position + 1], position + 2
        if size > 0x7F:
            size, start = read_length(data, position + 1)
        position = start + size
        if size >= SMALL and messages is tensors:
            parts.append(data[copied:start])
            kept = b"".join(without_data(data, range(start, position), weights))
            parts.append(kept)
            messages.append((start - removed, start - removed + len(kept)))
            copied, removed = position, removed + size - len(kept)
        else:
            messages.append((start - removed, position - removed))
    if position != stop or stop - removed > PROTO_BYTES:
        raise RareError
    parts += (data[copied:stop], b"\0")
    more = b"".join(rest)
    model = parse_model(b"".join([*others, length_delimited(GRAPH, len(more)), more]))
    if model.graph.node or model.graph.initializer or model.graph.value_info:
        raise RareError  # their keys have more bytes than they need
    return Messages(b"".join(parts), nodes, tensors, infos, model, weights)

"""Where the weights lie inside an .onnx file, so that they need not be parsed to be replaced.

A protobuf library reads and writes a message as a whole: for a file with its weights inside, that is several copies of
all of them, and most of the time of an update. The positions of the weights can be read off the lengths in the file.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import onnx

_GRAPH = onnx.ModelProto.DESCRIPTOR.fields_by_name["graph"].number
_INITIALIZER = onnx.GraphProto.DESCRIPTOR.fields_by_name["initializer"].number
_NAME = onnx.TensorProto.DESCRIPTOR.fields_by_name["name"].number
_RAW_DATA = onnx.TensorProto.DESCRIPTOR.fields_by_name["raw_data"].number
_LENGTH = 2
"""Protobuf's wire type of a field that says how long it is; 0 is a number, 1 and 5 are eight and four bytes."""


def without_weights(path: Path) -> tuple[bytes, dict[str, range]]:
    """An ONNX file without the bytes of its initializers, and where in the file those are.

    Returns:
        The serialized model, in which the main graph's initializers have no data, and the name of each to its bytes.

    Raises:
        ValueError: It is not a protobuf message.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found: dict[str, range] = {}
        try:
            rest = b"".join(_copied(data, range(len(data)), (_GRAPH, _INITIALIZER), found))
        except IndexError as error:
            raise ValueError("the file ends in the middle of a message") from error
    return rest, found


def _copied(data: mmap.mmap, message: range, below: tuple[int, ...], found: dict[str, range]) -> list[bytes]:
    """The parts of a message, the fields ``below`` without their weights."""
    parts: list[bytes] = []
    for number, start, value in _fields(data, message):
        if below and number == below[0]:
            inner = _copied(data, value, below[1:], found) if len(below) > 1 else _without_data(data, value, found)
            length = sum(map(len, inner))
            parts += [_varint(number << 3 | _LENGTH), _varint(length), *inner]
        else:
            parts.append(data[start : value.stop])
    return parts


def _without_data(data: mmap.mmap, tensor: range, found: dict[str, range]) -> list[bytes]:
    parts: list[bytes] = []
    name, raw = "", None
    for number, start, value in _fields(data, tensor):
        if number == _RAW_DATA:
            raw = value
            continue
        if number == _NAME:
            name = data[value.start : value.stop].decode()
        parts.append(data[start : value.stop])
    if raw is not None:
        found[name] = raw
    return parts


def _fields(data: mmap.mmap, message: range) -> Iterator[tuple[int, int, range]]:
    """Each field of a message: its number, where it begins, and where its value is."""
    position = message.start
    while position < message.stop:
        start = position
        key, position = _read_varint(data, position)
        match key & 7:
            case 0:
                end = _read_varint(data, position)[1]
            case 1:
                end = position + 8
            case 2:
                length, position = _read_varint(data, position)
                end = position + length
            case 5:
                end = position + 4
            case kind:
                raise ValueError(f"byte {start} is of wire type {kind}, which no field has")
        if end > message.stop:
            raise ValueError(f"the field at byte {start} is longer than the message around it")
        yield key >> 3, start, range(position, end)
        position = end


def _read_varint(data: mmap.mmap, position: int) -> tuple[int, int]:
    """A number of seven bits a byte, the low ones first, and the position behind it."""
    result = shift = 0
    while True:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
        shift += 7
        if shift > 63:
            raise ValueError(f"the number at byte {position} has more than 64 bits")


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)

"""The protobuf encoding of ONNX files: finding, removing and inserting the bytes of large tensors.

A protobuf library reads and writes a message as a whole: a file with embedded weights is copied several times, which
takes most of the time. The lengths in the file tell where the weights are, and the sizes of tensors where they go.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import onnx
from google.protobuf.message import Message

from modelexport.core.limits import FIELDS
from modelexport.errors import FileFormatError
from modelexport.files.regular import open_regular
from modelexport.files.text_fields import parse_model


def number_of(message: type[Message], field: str) -> int:
    """The number of a field of one of ONNX's messages."""
    return int(message.DESCRIPTOR.fields_by_name[field].number)


GRAPH = number_of(onnx.ModelProto, "graph")
NODE, INITIALIZER, INFO = (number_of(onnx.GraphProto, name) for name in ("node", "initializer", "value_info"))
_PROPERTIES = number_of(onnx.ModelProto, "metadata_props")
_INITIALIZERS = (GRAPH, INITIALIZER)
_NAME, _RAW_DATA = number_of(onnx.TensorProto, "name"), number_of(onnx.TensorProto, "raw_data")
VARINT, LENGTH = 0, 2
"""Protobuf's wire types of a number and of a length-delimited field; 1 and 5 are eight and four bytes."""
LOCATION = b"location"
"""The key of the file in a reference to data in another file."""
SMALL = 1024
"""Initializers of fewer bytes are read and written with the rest of the model."""


class Data(Protocol):
    """The bytes of a tensor."""

    @property
    def nbytes(self) -> int: ...

    def tobytes(self) -> bytes: ...


def without_weights(data: mmap.mmap) -> tuple[bytes, dict[str, range]]:
    """An ONNX file without the bytes of its large initializers, and the places of these bytes in the file.

    Returns:
        The serialized model, in which these initializers have no data, and the name of each to its byte range.

    Raises:
        ValueError: It is not a protobuf message.
    """
    found: dict[str, range] = {}
    try:
        return b"".join(_copied(data, range(len(data)), _INITIALIZERS, found)), found
    except IndexError as error:
        raise ValueError("the file ends in the middle of a message") from error


def names_other_files(path: Path) -> bool:
    """Whether a file may keep weights in other files: the key of every reference to one occurs in it.

    Raises:
        FileFormatError: It is not an ONNX file.
    """
    return LOCATION in _without_weights(path, only_with=LOCATION)


def read_serialized(path: Path) -> onnx.ModelProto:
    """A model as it is in its file, without large weights.

    Raises:
        FileFormatError: It is not an ONNX file.
    """
    rest = _without_weights(path)
    try:
        return parse_model(rest)
    except FileFormatError:
        raise
    except Exception as error:  # protobuf's exception type is not public
        raise FileFormatError(f"{path} is not an ONNX file, or damaged ({type(error).__name__})") from error


def _without_weights(path: Path, only_with: bytes = b"") -> bytes:
    """An ONNX file without its large weights; nothing if these bytes do not occur in it."""
    try:
        with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return without_weights(data)[0] if data.find(only_with) >= 0 else b""
    except FileFormatError:
        raise
    except Exception as error:  # the file is empty, or does not hold a protobuf message
        raise FileFormatError(f"{path} is not an ONNX file, or damaged ({type(error).__name__})") from error


def read_properties(path: Path) -> dict[str, str]:
    """The properties of a model, without the rest of it.

    Raises:
        FileFormatError: It is not an ONNX file.
    """
    try:
        with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            properties = b"".join(
                data[start : value.stop]
                for number, start, value in fields(data, range(len(data)))
                if number == _PROPERTIES
            )
        return {entry.key: entry.value for entry in parse_model(properties).metadata_props}
    except FileFormatError:
        raise
    except Exception as error:  # protobuf's exception type is not public
        raise FileFormatError(f"{path} is not an ONNX file, or damaged ({type(error).__name__})") from error


def with_weights(rest: bytes, tensors: Mapping[str, Data]) -> list[bytes | Data]:
    """The parts of a file, in order: ``rest``, which lacks the data of these initializers, with the data inserted."""
    return _filled(rest, range(len(rest)), _INITIALIZERS, tensors) if tensors else [rest]


def _copied(data: mmap.mmap, message: range, below: tuple[int, ...], found: dict[str, range]) -> list[bytes]:
    """The parts of a message, with the weights removed from the fields ``below``."""
    parts: list[bytes] = []
    copied = message.start
    for number, start, value in fields(data, message, large=below[0]):
        parts.append(data[copied:start])
        copied = value.stop
        inner = _copied(data, value, below[1:], found) if len(below) > 1 else without_data(data, value, found)
        length = sum(map(len, inner))
        parts += [varint(number << 3 | LENGTH), varint(length), *inner]
    parts.append(data[copied : message.stop])
    return parts


def without_data(data: mmap.mmap | bytes, tensor: range, found: dict[str, range]) -> list[bytes]:
    """The parts of a serialized tensor, without its bytes, whose place is added to those that were found."""
    parts: list[bytes] = []
    name, raw = "", None
    for number, start, value in fields(data, tensor):
        if number == _RAW_DATA and data[start] & 7 == LENGTH:
            raw = value
            continue
        if number == _NAME:
            name = data[value.start : value.stop].decode()
        parts.append(data[start : value.stop])
    if raw is not None:
        found[name] = raw
    return parts


def fields(data: mmap.mmap | bytes, message: range, large: int = 0) -> Iterator[tuple[int, int, range]]:
    """Each field of a message: its number, where it begins, and where its value is.

    Args:
        large: If not zero, only the fields with this number that are large.

    Raises:
        ValueError, IndexError: Protobuf would not read the message either.
    """
    position, stop, count = message.start, message.stop, 0
    while position < stop:
        start, count = position, count + 1
        if count > FIELDS:
            raise ValueError(f"more than {FIELDS:,} fields")
        key, position = data[position], position + 1
        if key >= 0x80:
            key, position = read_varint(data, start, _SIZE_BITS)
        if key < 8:
            raise ValueError(f"the field at byte {start} has no number")
        match key & 7:
            case 2:  # as nearly always
                length, position = data[position], position + 1
                if length >= 0x80:
                    length, position = read_varint(data, position - 1, _SIZE_BITS)
                end = position + length
            case 0:
                end = read_varint(data, position)[1]
            case 1:
                end = position + 8
            case 5:
                end = position + 4
            case kind:
                raise ValueError(f"the field at byte {start} has the invalid wire type {kind}")
        if end > stop:
            raise ValueError(f"the field at byte {start} is longer than its message")
        if not large or (key >> 3 == large and end - position >= SMALL):
            yield key >> 3, start, range(position, end)
        position = end


_SIZE_BITS = 32
"""Of a key or a length; protobuf reads at most five bytes of these."""


def read_varint(data: mmap.mmap | bytes, position: int, bits: int = 64) -> tuple[int, int]:
    """A varint (seven bits a byte, the lowest first), and the position after it."""
    result = shift = 0
    while True:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
        shift += 7
        if shift >= bits:
            raise ValueError(f"the number at byte {position} has more than {bits} bits")


def read_length(data: mmap.mmap | bytes, position: int) -> tuple[int, int]:
    """A varint as protobuf writes it, in as few bytes as possible, and the position after it."""
    size, after = read_varint(data, position)
    if not data[after - 1] and after > position + 1:
        raise ValueError(f"the number at byte {position} has more bytes than it needs")
    return size, after


def fields_between(data: bytes, above: int, below: int = FIELDS) -> bytes:
    """The fields of a message whose numbers are between two others."""
    found = fields(data, range(len(data)))
    return b"".join(data[start : value.stop] for number, start, value in found if above < number < below)


@lru_cache(4096)
def length_delimited(number: int, length: int) -> bytes:
    """The beginning of a field whose value has a length in bytes: its key, and that length."""
    return varint(number << 3 | LENGTH) + varint(length)


def key_of(message: type[Message], field: str, kind: int = LENGTH) -> bytes:
    """What a field of one of ONNX's messages begins with: its number and its wire type."""
    return varint(number_of(message, field) << 3 | kind)


def varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _filled(data: bytes, message: range, below: tuple[int, ...], tensors: Mapping[str, Data]) -> list[bytes | Data]:
    """The parts of a message, with the weights inserted into the fields ``below``."""
    parts: list[bytes | Data] = []
    for number, start, value in fields(data, message):
        if number == below[0]:
            inner = _filled(data, value, below[1:], tensors) if len(below) > 1 else _with_data(data, value, tensors)
            length = sum(len(part) if isinstance(part, bytes) else part.nbytes for part in inner)
            parts += [length_delimited(number, length), *inner]
        else:
            parts.append(data[start : value.stop])
    return parts


def _with_data(data: bytes, message: range, tensors: Mapping[str, Data]) -> list[bytes | Data]:
    parts = list(fields(data, message))
    name = next((data[value.start : value.stop].decode() for number, _, value in parts if number == _NAME), "")
    tensor = tensors.get(name)
    if tensor is None:
        return [data[message.start : message.stop]]
    before = b"".join(data[start : value.stop] for number, start, value in parts if number < _RAW_DATA)
    behind = b"".join(data[start : value.stop] for number, start, value in parts if number > _RAW_DATA)
    return [before + length_delimited(_RAW_DATA, tensor.nbytes), tensor, behind]

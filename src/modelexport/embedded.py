"""Files with their weights inside: opened without reading these, and written one weight at a time.

A protobuf library reads and writes a message as a whole: for a file with its weights inside, that is several copies of
all of them, and most of the time that it takes. Where the weights lie can be read off the lengths in the file, and
where they have to go follows from their sizes.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import onnx
import onnx_ir as ir

from modelexport.graph import initializers
from modelexport.schema import WEIGHTS

_GRAPH = onnx.ModelProto.DESCRIPTOR.fields_by_name["graph"].number
_INITIALIZER = onnx.GraphProto.DESCRIPTOR.fields_by_name["initializer"].number
_INITIALIZERS = (_GRAPH, _INITIALIZER)
_NAME = onnx.TensorProto.DESCRIPTOR.fields_by_name["name"].number
_RAW_DATA = onnx.TensorProto.DESCRIPTOR.fields_by_name["raw_data"].number
_LENGTH = 2
"""Protobuf's wire type of a field that says how long it is; 0 is a number, 1 and 5 are eight and four bytes."""
LARGEST_INSIDE = 10**9
"""Bytes of weights above which they go to a file of their own."""
_SMALL = 1024
"""Bytes of an initializer that is not worth the trouble."""


class EmbeddedTensor(ir.LazyTensor):
    """An initializer that is read from its file, which stays open, each time that it is asked for."""

    def __init__(self, data: mmap.mmap, place: range, tensor: ir.TensorProtocol) -> None:
        def read() -> ir.TensorProtocol:
            raw = data[place.start : place.stop]
            proto = onnx.TensorProto(name=tensor.name or "", data_type=tensor.dtype, dims=shape.numpy(), raw_data=raw)
            return ir.serde.deserialize_tensor(proto)

        shape = ir.Shape(tensor.shape.numpy())
        super().__init__(
            read,
            tensor.dtype,
            shape,
            name=tensor.name,
            doc_string=tensor.doc_string,
            metadata_props=dict(tensor.metadata_props),
        )
        self.place = place
        """The bytes in the file."""
        self._data = data

    def tofile(self, file: BinaryIO) -> None:
        with memoryview(self._data) as view:
            file.write(view[self.place.start : self.place.stop])


def load_without_weights(path: Path) -> ir.Model:
    """Read an ONNX file; large initializers inside it become :class:`EmbeddedTensor`.

    Raises:
        ValueError: It is not a protobuf message.
        google.protobuf.message.DecodeError: It is not a model.
    """
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    found: dict[str, range] = {}
    try:
        rest = b"".join(_copied(data, range(len(data)), _INITIALIZERS, found))
    except IndexError as error:
        raise ValueError("the file ends in the middle of a message") from error
    model = ir.serde.deserialize_model(onnx.ModelProto.FromString(rest))
    if b"location" in rest:  # the key of every tensor in another file
        ir.external_data.set_base_dir(model.graph, path.parent)
    for value in model.graph.initializers.values():
        place, tensor = found.get(value.name or ""), value.const_value
        if place is not None and tensor is not None:
            if len(place) != tensor.nbytes:
                raise ValueError(f"{value.name} has {len(place)} bytes instead of {tensor.nbytes}")
            value.const_value = EmbeddedTensor(data, place, tensor)
    return model


class _Hollow(ir.LazyTensor):
    """Stands for a tensor where a model is serialized without its weights."""

    def __init__(self, tensor: ir.TensorProtocol) -> None:
        super().__init__(
            lambda: tensor,
            tensor.dtype,
            ir.Shape(tensor.shape.numpy()),
            name=tensor.name,
            doc_string=tensor.doc_string,
            metadata_props=dict(tensor.metadata_props),
        )

    def tobytes(self) -> bytes:
        return b""


def save(model: ir.Model, path: Path, *, external: bool | None = None) -> None:
    """Write a model with its weights inside it, or in ``NAME.onnx.data`` beside it; one of them at a time is in memory.

    The bytes are those that protobuf would write. The model stays as it is, but is linked to no files any more.

    Args:
        external: Beside it; if left out, where some of them are in files of their own now, or all exceed 1 GB.

    Raises:
        OSError: The file cannot be written.
    """
    if external is None:
        now = [value.const_value for value in initializers(model) if value.const_value is not None]
        apart = any(isinstance(tensor, ir.ExternalTensor) for tensor in now)
        external = apart or sum(tensor.nbytes for tensor in now) > LARGEST_INSIDE
    model.metadata_props.pop(WEIGHTS, None)
    if external:
        ir.save(model, path, external_data=f"{path.name}.data")
    else:
        _write(model, path, lambda tensor: isinstance(tensor, ir.ExternalTensor) or _is_large(tensor))


def save_with_references(model: ir.Model, path: Path) -> None:
    """Write a model with its weights inside it, save those that are external data: these stay where they are.

    Raises:
        OSError: The file cannot be written.
    """
    _write(model, path, lambda tensor: not isinstance(tensor, ir.ExternalTensor) and _is_large(tensor))


def _write(model: ir.Model, path: Path, streamed: Callable[[ir.TensorProtocol], bool]) -> None:
    values = [v for v in model.graph.initializers.values() if v.const_value is not None and streamed(v.const_value)]
    tensors = {value.name or "": value.const_value for value in values if value.const_value is not None}
    try:
        for value in values:
            value.const_value = _Hollow(tensors[value.name or ""])
        rest = ir.serde.serialize_model(model).SerializeToString()
    finally:
        for value in values:
            value.const_value = tensors[value.name or ""]
    with path.open("wb") as file:
        for part in _filled(rest, range(len(rest)), _INITIALIZERS, tensors):
            if isinstance(part, bytes):
                file.write(part)
            elif hasattr(part, "tofile"):  # an optional part of the protocol
                part.tofile(file)
            else:
                file.write(part.tobytes())


def _is_large(tensor: ir.TensorProtocol) -> bool:
    if tensor.dtype == ir.DataType.STRING:
        return False
    # onnx_ir wraps what goes wrong while a lazy tensor is computed in exceptions of its own.
    return tensor.nbytes >= _SMALL or isinstance(tensor, ir.LazyTensor)


def _filled(
    data: bytes, message: range, below: tuple[int, ...], tensors: Mapping[str, ir.TensorProtocol]
) -> list[bytes | ir.TensorProtocol]:
    """The parts of a message, the fields ``below`` with their weights."""
    parts: list[bytes | ir.TensorProtocol] = []
    for number, start, value in _fields(data, message):
        if number == below[0]:
            inner = _filled(data, value, below[1:], tensors) if len(below) > 1 else _with_data(data, value, tensors)
            length = sum(len(part) if isinstance(part, bytes) else part.nbytes for part in inner)
            parts += [_varint(number << 3 | _LENGTH) + _varint(length), *inner]
        else:
            parts.append(data[start : value.stop])
    return parts


def _with_data(
    data: bytes, message: range, tensors: Mapping[str, ir.TensorProtocol]
) -> list[bytes | ir.TensorProtocol]:
    fields = list(_fields(data, message))
    name = next((data[value.start : value.stop].decode() for number, _, value in fields if number == _NAME), "")
    tensor = tensors.get(name)
    if tensor is None:
        return [data[message.start : message.stop]]
    before = b"".join(data[start : value.stop] for number, start, value in fields if number < _RAW_DATA)
    behind = b"".join(data[start : value.stop] for number, start, value in fields if number > _RAW_DATA)
    return [before + _varint(_RAW_DATA << 3 | _LENGTH) + _varint(tensor.nbytes), tensor, behind]


def _copied(data: mmap.mmap, message: range, below: tuple[int, ...], found: dict[str, range]) -> list[bytes]:
    """The parts of a message, the fields ``below`` without their weights."""
    parts: list[bytes] = []
    for number, start, value in _fields(data, message):
        if number == below[0] and len(value) >= _SMALL:
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


def _fields(data: mmap.mmap | bytes, message: range) -> Iterator[tuple[int, int, range]]:
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


def _read_varint(data: mmap.mmap | bytes, position: int) -> tuple[int, int]:
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

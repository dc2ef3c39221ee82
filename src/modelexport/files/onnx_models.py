"""Files with their weights inside: opened without reading these, and written one weight at a time."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import onnx
import onnx_ir as ir

from modelexport.errors import FileFormatError
from modelexport.files.linked import read_linked
from modelexport.files.wire import SMALL, with_weights, without_weights
from modelexport.format import keys
from modelexport.graph.nodes import initializers

LARGEST_INSIDE = 10**9
"""Bytes of weights above which they go to a file of their own."""


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


def read_without_weights(path: Path) -> ir.Model:
    """Read an ONNX file; large initializers inside it become :class:`EmbeddedTensor`.

    Raises:
        ValueError: It is not a protobuf message.
        google.protobuf.message.DecodeError: It is not a model.
    """
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    rest, found = without_weights(data)
    proto = onnx.ModelProto.FromString(rest)
    _lift_properties(proto.graph)
    model = ir.serde.deserialize_model(proto)
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


def save_model(model: ir.Model, path: Path, *, external: bool | None = None) -> None:
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
    model.metadata_props.pop(keys.WEIGHTS, None)
    if external:
        values = [value for value in initializers(model) if value.const_value is not None]
        tensors = [value.const_value for value in values]
        try:
            ir.external_data.unload_from_model(model, path.parent, f"{path.name}.data", size_threshold_bytes=256)
            save_with_references(model, path)
        finally:
            for value, tensor in zip(values, tensors, strict=True):
                value.const_value = tensor
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
        proto = ir.serde.serialize_model(model)
    finally:
        for value in values:
            value.const_value = tensors[value.name or ""]
    _describe_initializers(proto.graph)
    with path.open("wb") as file:
        for part in with_weights(proto.SerializeToString(), tensors):
            if isinstance(part, bytes):
                file.write(part)
            elif hasattr(part, "tofile"):  # an optional part of the protocol
                part.tofile(file)
            else:
                file.write(part.tobytes())


def _describe_initializers(graph: onnx.GraphProto) -> None:
    """Move the properties of initializers from ``value_info``, where onnx_ir writes them, to their tensors.

    A tensor has its type and shape itself, and ONNX Runtime's quantizers fail on an initializer that has both.
    """
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    described = 0
    for info in graph.value_info:  # those of initializers come first
        if info.name not in tensors:
            break
        tensors[info.name].metadata_props.extend(info.metadata_props)
        described += 1
    del graph.value_info[:described]
    for value in graph.input:
        if value.name in tensors:
            tensors[value.name].metadata_props.extend(value.metadata_props)
            del value.metadata_props[:]
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _describe_initializers(attribute.g)
            for nested in attribute.graphs:
                _describe_initializers(nested)


def _lift_properties(graph: onnx.GraphProto) -> None:
    """Move the properties of initializers from their tensors to ``value_info``, which onnx_ir reads into the value.

    The other way round is :func:`_describe_initializers`.
    """
    inputs = {value.name: value for value in graph.input}
    for tensor in graph.initializer:
        if not tensor.metadata_props:
            continue
        value = inputs.get(tensor.name)
        if value is None:
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            value.metadata_props.extend(tensor.metadata_props)
            graph.value_info.append(value)
        else:
            value.metadata_props.extend(tensor.metadata_props)
        del tensor.metadata_props[:]
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _lift_properties(attribute.g)
            for nested in attribute.graphs:
                _lift_properties(nested)


def _upgrade(model: ir.Model) -> None:
    """Bring a model of an older format version up to today's, in place."""
    properties = model.metadata_props
    if properties.get(keys.FORMAT_VERSION_KEY) in keys.READ_VERSIONS:
        properties[keys.FORMAT_VERSION_KEY] = keys.FORMAT_VERSION
        if keys.FORMER_ENCODING in properties:
            properties[keys.ENCODING] = properties.pop(keys.FORMER_ENCODING)


def _is_large(tensor: ir.TensorProtocol) -> bool:
    if tensor.dtype == ir.DataType.STRING:
        return False
    # onnx_ir wraps what goes wrong while a lazy tensor is computed in exceptions of its own.
    return tensor.nbytes >= SMALL or isinstance(tensor, ir.LazyTensor)


def load_onnx(path: Path) -> ir.Model:
    """Read any ONNX file.

    Raises:
        FileFormatError: It is missing, empty, or not an ONNX file.
    """
    if not path.is_file():
        raise FileFormatError(f"there is no file {path}")
    if path.stat().st_size == 0:
        raise FileFormatError(f"{path} is empty: it was not written completely; export it again")
    try:
        model = read_without_weights(path)
    except Exception as error:  # protobuf's exception type is not public, and damage shows in many ways
        raise FileFormatError(f"{path} is not an ONNX file, or damaged ({type(error).__name__})") from error
    _upgrade(model)
    read_linked(model, path.parent)
    if not model.opset_imports and not len(model.graph):
        raise FileFormatError(f"{path} is not an ONNX file: it has no operator set and no nodes")
    return model

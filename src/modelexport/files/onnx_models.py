"""Reading and writing ONNX files without holding their weights in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import onnx
import onnx_ir as ir

from modelexport.core.limits import LARGE_WEIGHTS
from modelexport.core.text import error_line, reason_of
from modelexport.errors import FileFormatError
from modelexport.files.atomic_writing import check_space
from modelexport.files.linked_weights import read_linked, seal
from modelexport.files.map_types import hide_map_types
from modelexport.files.protobuf_reading import read_serialized
from modelexport.files.protobuf_writing import Tensors, serialized, size_of, to_proto
from modelexport.files.untrusted_graphs import DEFAULT_DOMAIN, check_model
from modelexport.format import keys
from modelexport.format.versions import FORMAT_VERSION
from modelexport.graph.nodes import held_initializers, initializers, is_sorted
from modelexport.graph.properties import format_version, read_properties, record, take_properties

SMALLEST_OUTSIDE = 257
"""Bytes of the smallest initializer that is written to a separate file: onnx_ir's own limit."""

_NOTHING: Tensors = MappingProxyType({})
_SMALL = 1024
"""Initializers of fewer bytes are serialized with the rest of the model."""


def load_onnx(path: Path, *, ours: bool = True) -> ir.Model:
    """Read any ONNX file; weights in other files are read when used.

    Args:
        ours: Whether the file's records of its data files still hold: false for a file that another tool wrote.
    """
    if path.is_dir():
        raise FileFormatError(f"{path} is a folder: give one of the .onnx files in it")
    if path.is_file() and not path.stat().st_size:
        raise FileFormatError(f"{path} is empty: it was not written completely; export it again")
    try:
        proto = read_serialized(path)
        check_model(proto)
        hide_map_types(proto)
        model = ir.serde.deserialize_model(proto)
        for imports in (model.opset_imports, *(function.opset_imports for function in model.functions.values())):
            if DEFAULT_DOMAIN in imports:  # onnx_ir gives its nodes the other name
                imports.setdefault("", imports.pop(DEFAULT_DOMAIN))
        if not is_sorted(model.graph):  # runtimes sort the nodes, too
            model.graph.sort()
        for value in held_initializers(model):
            take_properties(value)
        if format_version(model) in (None, FORMAT_VERSION):  # others are refused
            read_properties(model)
        read_linked(model, path.parent, ours=ours)
    except FileFormatError as error:
        if str(path) in str(error):
            raise
        raise FileFormatError(f"{path}: {error}") from error
    except Exception as error:  # damage causes many kinds of errors
        raise FileFormatError(f"{path} is not an ONNX file, or damaged: {error_line(error)}") from error
    if not model.opset_imports and not len(model.graph):
        raise FileFormatError(f"{path} is not an ONNX file: it has no opset and no nodes")
    return model


def save_model(
    model: ir.Model,
    path: Path,
    *,
    external: bool | None = None,
    tensors: Tensors = _NOTHING,
    documents: Mapping[str, bytes] | None = None,
    same_graph: bool = False,
) -> None:
    """Write a model with its weights inside it, or in ``NAME.onnx.data`` beside it, one tensor in memory at a time.

    The bytes are those that protobuf would write. The model is not changed, except that its properties no longer name
    the files that it was linked to. A model may be written over the file that it was read from; its weights in a data
    file that was replaced cannot be read any more.

    Args:
        external: Write the weights beside the model. By default this is done if some of them are in separate files
            already, or if they exceed 1 GB in total.
        tensors: What to write for some initializers instead of their own tensors.
        documents: The documents beside the model: the suffix of each name to the content. The model records their
            digests, which are checked when they are read.
        same_graph: Only weights differ from the file that was read: the recorded documents stay valid.

    Raises:
        OSError: The file cannot be written.
        OutputError: There is not enough space for it.
    """
    now = {value: value.const_value for value in initializers(model) if value.const_value is not None}
    if external is None:
        apart = any(isinstance(tensor, ir.ExternalTensor) for tensor in now.values())
        external = apart or not fits_inside(sum(tensor.nbytes for tensor in now.values()))
    now.update(tensors)
    if not same_graph:
        record_documents(model, documents or {})
    for key in (keys.WEIGHTS, keys.DATA):
        record(model, key, None)
    outside = {value: now[value] for value in now if external and now[value].nbytes >= SMALLEST_OUTSIDE}
    # The file that the others are read from may be the one that is replaced.
    placed: dict[ir.Value, ir.TensorProtocol] = {
        value: inside_file(tensor, at_once=bool(outside)) for value, tensor in now.items() if value not in outside
    }
    if outside:
        data = path.with_name(path.name + keys.DATA_SUFFIX)
        placed |= write_data_file(outside, path.parent, data.name)
        record(model, keys.DATA, {data.name: seal(data)})
    save_with_references(model, path, placed)


def fits_inside(nbytes: int) -> bool:
    """Whether weights of this many bytes are in the model file unless a caller decides otherwise."""
    return nbytes <= LARGE_WEIGHTS


def record_documents(model: ir.Model, documents: Mapping[str, bytes]) -> None:
    """Record the digests of a model's documents in it, in place: suffix of each name to the content."""
    digests = {suffix: hashlib.sha256(content).hexdigest() for suffix, content in documents.items()}
    record(model, keys.DOCUMENTS, digests)


def write_data_file(tensors: Tensors, folder: Path, name: str) -> dict[ir.Value, ir.ExternalTensor]:
    """Write tensors one after the other into a file; returns a reference to each.

    Raises:
        OSError: The file cannot be written.
    """
    check_space(folder / name, sum(tensor.nbytes for tensor in tensors.values()))
    external = ir.external_data.convert_tensors_to_external(list(tensors.values()), folder, name)
    return dict(zip(tensors, external, strict=True))


def inside_file(tensor: ir.TensorProtocol, *, at_once: bool = False) -> ir.TensorProtocol:
    """The tensor to write into the model file; one from another file is read then, or at once."""
    if not isinstance(tensor, ir.ExternalTensor):
        return tensor

    def read() -> ir.TensorProtocol:
        return ir.tensor(tensor.numpy().copy(), tensor.dtype, name=tensor.name, doc_string=tensor.doc_string)

    shape = ir.Shape(tensor.shape.numpy())
    later = ir.LazyTensor(read, tensor.dtype, shape, name=tensor.name, doc_string=tensor.doc_string)
    return read() if at_once else later


def save_with_references(model: ir.Model, path: Path, placed: Tensors = _NOTHING) -> None:
    """Write a model with its weights inside it, except external data, which stays in its files.

    Args:
        placed: What to write for some initializers instead of their own tensors.

    Raises:
        OSError: The file cannot be written.
    """
    now = {value: placed.get(value, value.const_value) for value in model.graph.initializers.values()}
    streamed = {
        value: tensor
        for value, tensor in now.items()
        if tensor is not None and not isinstance(tensor, ir.ExternalTensor) and tensor.dtype != ir.DataType.STRING
        # onnx_ir wraps exceptions raised while a lazy tensor is computed in its own exceptions.
        if tensor.nbytes >= _SMALL or isinstance(tensor, ir.LazyTensor)
    }
    described = {
        value: ir.TensorProtoTensor(
            onnx.TensorProto(
                name=tensor.name or "",
                data_type=tensor.dtype,
                dims=tensor.shape.numpy(),
                doc_string=tensor.doc_string or None,
            )
        )
        for value, tensor in streamed.items()
    }
    try:
        proto = to_proto(model, {**placed, **described})
        parts = serialized(proto, {value.name or "": tensor for value, tensor in streamed.items()})
    except (ir.serde.SerdeError, UnicodeError, TypeError) as error:  # names that are not valid text
        reason = reason_of(error.__cause__ or error)
        raise FileFormatError(f"the model contains data that cannot be written: {reason}") from error
    check_space(path, size_of(parts))
    with path.open("wb") as file:
        for part in parts:
            file.write(part if isinstance(part, bytes) else part.tobytes())

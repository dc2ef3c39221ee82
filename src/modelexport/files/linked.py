"""Weights in files beside a model: where they may be, whether they are unchanged, and how they are read.

A model names the files that hold its weights, and a model may come from an untrusted source. Each file has to be a
regular file inside the model's folder, with the size and content that the model recorded when it was written.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from modelexport.errors import FileFormatError, WeightsError
from modelexport.files.records import recorded_files
from modelexport.files.regular import open_regular
from modelexport.files.safetensors_files import read_header
from modelexport.files.serialized import read_serialized
from modelexport.files.tensors import serialized_tensors
from modelexport.format import documents, keys
from modelexport.graph.initializers import bind_tensors
from modelexport.graph.nodes import all_nodes, initializers

_TAIL = hashlib.sha256().digest_size
"""Bytes at the end of a data file: the SHA-256 of everything before them."""
_BLOCK = 16 * 2**20


class WeightsBeside:
    """One file that holds weights of a model; checked before it is first read, and again when it has changed."""

    def __init__(
        self,
        folder: Path,
        location: str,
        *,
        linked: documents.WeightsFile | None = None,
        written: documents.DataFile | None = None,
    ) -> None:
        self.path = folder / location
        self._folder, self._location = folder, location
        self._linked, self._written = linked, written
        self._spans: dict[tuple[int, int], None] = {}
        """Begin and end of each tensor that the model reads from it."""
        self._checked: tuple[int, ...] | None = None

    def add(self, tensor: ir.ExternalTensor) -> None:
        """Register a tensor in the file.

        Raises:
            FileFormatError: Its offset or length is not possible.
        """
        begin, size = tensor.offset or 0, tensor.nbytes
        if begin < 0 or tensor.length not in (None, size):
            raise FileFormatError(
                f"{self.path}: the place of {tensor.name!r} is damaged: {tensor.length} bytes from byte {begin} for a "
                f"tensor of {size:,} bytes"
            )
        self._spans[begin, begin + size] = None

    def is_missing(self) -> bool:
        """Whether the file does not exist, at a place where it may be."""
        return not self._outside() and not self.path.exists()

    def fault(self) -> str:
        """What is wrong with the file, in a sentence; empty if it may be read."""
        if place := self._outside():
            return place
        try:
            state = self.path.stat()
        except OSError:
            return f"{self.path}, which holds weights, is missing"
        signature = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
        if signature == self._checked:
            return ""
        fault = self._content(state)
        self._checked = None if fault else signature
        return fault

    def check(self) -> None:
        """Fail before a byte is read.

        Raises:
            FileFormatError: The file is missing, has changed, or may not be read.
        """
        if fault := self.fault():
            raise FileFormatError(fault)

    def _outside(self) -> str:
        """Why a file at this place may not be read, judged by its name alone."""
        inside = Path(os.path.normpath(self._location))
        if (
            not self._location
            or "\0" in self._location
            or inside.is_absolute()
            or inside.parts[:1] in ((), (os.pardir,))
        ):
            return f"{self._folder}: the model keeps weights in {self._location!r}, which is not a file in its folder"
        if not Path(os.path.realpath(self.path)).is_relative_to(os.path.realpath(self._folder)):
            return f"{self.path}, which should hold weights, points out of the model's folder: put the file there"
        return ""

    def _content(self, state: os.stat_result) -> str:
        if not stat.S_ISREG(state.st_mode):
            return f"{self.path}, which should hold weights, is not a regular file"
        size, end = state.st_size, max((end for _, end in self._spans), default=0)
        recorded = self._linked or self._written
        if recorded is not None and size != recorded.size:
            return f"{self.path} was changed after the export: it has {size:,} bytes and had {recorded.size:,}"
        if size < end:
            return f"{self.path} is cut off: it has {size:,} bytes and the model's weights end at {end:,}"
        if self._linked is not None:
            return self._linked_fault(self._linked)
        if self._written is not None:
            with open_regular(self.path) as file:
                file.seek(-min(_TAIL, size), os.SEEK_END)
                if file.read().hex() != self._written.sha256:
                    return (
                        f"{self.path} does not belong to the model beside it: they are from different runs; write "
                        "both again"
                    )
        elif state.st_nlink > 1:
            return (
                f"{self.path}, which holds weights, has another name as well (a hard link), and the model was not "
                "linked to it: copy it"
            )
        return ""

    def _linked_fault(self, recorded: documents.WeightsFile) -> str:
        """How the file differs from the safetensors file that the model was linked to."""
        try:
            found = read_header(self.path)
        except WeightsError:
            found = None
        if found is None or found.header != recorded.header:
            return f"{self.path} was changed after the export: its header differs"
        tensors = {(place.offset, place.offset + place.length) for place in found.tensors.values()}
        if self._spans.keys() - tensors:
            return f"{self.path} has no tensors at the offsets that the model records for its weights"
        return ""


class LinkedTensor(ir.ExternalTensor):
    """External data that is checked before it is read; no file stays open for it.

    ``onnx_ir`` refuses every file with several hard links, which a linked checkpoint has; :class:`WeightsBeside`
    decides which of them may be read.
    """

    def __init__(self, tensor: ir.ExternalTensor, beside: WeightsBeside, folder: Path) -> None:
        super().__init__(
            tensor.location,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=tensor.name,
            doc_string=tensor.doc_string,
            metadata_props=dict(tensor.metadata_props),
            base_dir=folder,
        )
        self.beside = beside

    def _in_file(self) -> ir.ExternalTensor:
        if not self.valid():
            raise FileFormatError(f"{self.path} has been replaced since it was read: read it again")
        self.beside.check()
        # Without a folder onnx_ir makes no checks of its own.
        path = os.path.abspath(self.path)  # noqa: PTH100 - keeps symbolic links
        shape = ir.Shape(self.shape.numpy())
        return ir.ExternalTensor(path, self.offset, self.length, self.dtype, shape=shape, name=self.name)

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return self._in_file().__array__(dtype)

    def numpy(self) -> np.ndarray:
        """The array, mapped from the file."""
        return self._in_file().numpy()

    def tobytes(self) -> bytes:
        """The bytes."""
        return self._in_file().tobytes() if self.nbytes else b""

    def tofile(self, file: Any) -> None:
        """Write the bytes without holding them in memory."""
        if self.nbytes:
            self._in_file().tofile(file)


class _FilesBeside:
    """The files that hold weights of a model, by location.

    Args:
        properties: The model's, which record its files.
        ours: Whether its records of its data files still hold.

    Raises:
        FileFormatError: The records are damaged.
    """

    def __init__(self, folder: Path, properties: Mapping[str, str], *, ours: bool = True) -> None:
        self._folder = folder
        self._linked = recorded_files(properties, keys.WEIGHTS, documents.WeightsFile)
        self._written = recorded_files(properties, keys.DATA, documents.DataFile) if ours else {}
        self.files: dict[str, WeightsBeside] = {}

    def file_of(self, tensor: ir.ExternalTensor) -> WeightsBeside:
        """The file of a tensor, which registers it."""
        location = str(tensor.location)
        if location not in self.files:
            self.files[location] = WeightsBeside(
                self._folder, location, linked=self._linked.get(location), written=self._written.get(location)
            )
        self.files[location].add(tensor)
        return self.files[location]


def read_linked(model: ir.Model, folder: Path, *, ours: bool = True) -> None:
    """Make external tensors read from files in or below ``folder``, each file checked first, in place.

    Args:
        ours: Whether the model's records of its data files still hold: a tool that keeps the properties of models may
            have written its own data file under the same name.

    Raises:
        FileFormatError: The model's records of its files are damaged.
    """
    files = _FilesBeside(folder, model.metadata_props, ours=ours)

    def checked(tensor: ir.ExternalTensor) -> LinkedTensor:
        return LinkedTensor(tensor, files.file_of(tensor), folder)

    tensors = {value: value.const_value for value in initializers(model)}
    bind_tensors({value: checked(t) for value, t in tensors.items() if isinstance(t, ir.ExternalTensor)})
    for node in all_nodes(model):
        for name, attribute in list(node.attributes.items()):
            if attribute.is_ref():
                continue
            if attribute.type is ir.AttributeType.TENSOR:
                tensor = attribute.as_tensor()
                if isinstance(tensor, ir.ExternalTensor):
                    node.attributes[name] = ir.AttrTensor(name, checked(tensor))
            elif attribute.type is ir.AttributeType.TENSORS:
                several = attribute.as_tensors()
                if any(isinstance(tensor, ir.ExternalTensor) for tensor in several):
                    node.attributes[name] = ir.AttrTensors(
                        name, [checked(t) if isinstance(t, ir.ExternalTensor) else t for t in several]
                    )


def weights_beside(model: ir.Model) -> list[WeightsBeside]:
    """The files that hold weights of a model that was read from a file."""
    return _beside([*_in_initializers(model), *_in_attributes(model)])


def _beside(tensors: Iterable[ir.TensorProtocol]) -> list[WeightsBeside]:
    return list(dict.fromkeys(tensor.beside for tensor in tensors if isinstance(tensor, LinkedTensor)))


def _in_initializers(model: ir.Model) -> list[ir.TensorProtocol]:
    return [value.const_value for value in initializers(model) if value.const_value is not None]


def _in_attributes(model: ir.Model) -> list[ir.TensorProtocol]:
    return [
        attribute.as_tensor()
        for node in all_nodes(model)
        if node.attributes.data
        for attribute in node.attributes.data.values()
        if attribute.type is ir.AttributeType.TENSOR and not attribute.is_ref()
    ]


def check_files(path: Path | None, model: ir.Model) -> None:
    """Refuse a model whose weights files are missing, too short, or changed since it was exported.

    Raises:
        FileFormatError: Names each such file.
    """
    if faults := changed_files(path, model):
        raise FileFormatError(f"{'; '.join(faults)}: put the files back, or export again")


def changed_files(path: Path | None, model: ir.Model) -> list[str]:
    """What is wrong with a model's weights files, one sentence for each file.

    A linked file must have the size and the header that it had when the model was exported. A change of its weights
    alone, in place, is not detected; :func:`modelexport.verify.model.verify` compares them.

    Args:
        path: The model's file; ``None`` for a model in memory, whose tensors know their files.
    """
    tensors = _in_initializers(model)
    faults = [fault for beside in _beside([*tensors, *_in_attributes(model)]) if (fault := beside.fault())]
    ends: dict[Path, int] = {}
    for tensor in tensors:
        if isinstance(tensor, ir.ExternalTensor) and not isinstance(tensor, LinkedTensor):
            file = Path(tensor.path) if path is None else path.parent / tensor.location
            end = (tensor.offset or 0) + (tensor.nbytes if tensor.length is None else tensor.length)
            ends[file] = max(ends.get(file, 0), end)
    for file, end in ends.items():
        if not file.is_file():
            faults.append(f"{file}, which holds weights, is missing")
        elif (size := file.stat().st_size) < end:
            faults.append(f"{file} is cut off: it has {size:,} bytes and the model's weights end at {end:,}")
    return faults


def check_weights(model: ir.Model) -> None:
    """Fail if an existing weights file may not be read. A missing file is reported when it is needed.

    Raises:
        FileFormatError: Names the file and the reason.
    """
    for beside in weights_beside(model):
        if not beside.is_missing():
            beside.check()


def check_tensors(tensors: Iterable[ir.TensorProtocol | None]) -> None:
    """Check the files of tensors that other software will read.

    Raises:
        FileFormatError: A file is missing, has changed, or may not be read.
    """
    for beside in dict.fromkeys(tensor.beside for tensor in tensors if isinstance(tensor, LinkedTensor)):
        beside.check()


def data_files(path: Path) -> list[Path]:
    """The weights files that a model names, whether or not they exist.

    Raises:
        FileFormatError: It is not an ONNX file.
    """
    with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data.find(b"location") < 0:  # the key of every reference to another file
            return []
    model = read_serialized(path)
    locations = {
        entry.value for tensor in serialized_tensors(model) for entry in tensor.external_data if entry.key == "location"
    }
    return [path.parent / location for location in sorted(locations) if "\0" not in location]


def check_weight_files(path: Path) -> None:
    """Check the weights files of a model that other software will read.

    Raises:
        FileFormatError: It is not an ONNX file, or a weights file is missing, has changed, or may not be read.
    """
    model = read_serialized(path)
    external = [tensor for tensor in serialized_tensors(model) if tensor.data_location == onnx.TensorProto.EXTERNAL]
    if not external:
        return
    beside = _FilesBeside(path.parent, {entry.key: entry.value for entry in model.metadata_props})
    for serialized in external:
        try:
            tensor = ir.serde.deserialize_tensor(serialized)
            assert isinstance(tensor, ir.ExternalTensor)
            beside.file_of(tensor)
        except FileFormatError:
            raise
        except Exception as error:  # damage causes many kinds of errors
            raise FileFormatError(f"{path}: the place of {serialized.name!r} is damaged") from error
    for file in beside.files.values():
        file.check()


def seal_data(path: Path) -> documents.DataFile:
    """Append the digest of a data file to its content, so that the file can be told from every other.

    ONNX ignores bytes after the last tensor. Two files of the same content stay equal.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    with path.open("ab") as file:
        file.write(digest.digest())
    return documents.DataFile(path.stat().st_size, digest.hexdigest())

"""Weights in files beside a model: where they may be, whether they are unchanged, how they are read and linked.

A model names the files that hold its weights, and a model may come from an untrusted source. Each file has to be a
regular file inside the model's folder, with the size and content that the model recorded when it was written.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import onnx_ir as ir

from modelexport.core.decoding import decode_json
from modelexport.errors import FileFormatError, WeightsError
from modelexport.files.regular import open_regular
from modelexport.files.safetensors_files import read_header
from modelexport.files.serialized import read_serialized, serialized_tensors
from modelexport.format import keys
from modelexport.format.documents import DataFile, WeightsFile
from modelexport.graph.initializers import bind_tensors
from modelexport.graph.nodes import all_nodes, initializers

_TAIL = hashlib.sha256().digest_size
"""Bytes at the end of a data file: the SHA-256 of everything before them."""
_FICLONE = 0x40049409
"""The Linux ioctl that makes a file share the blocks of another until one of them is written to."""
T = TypeVar("T")


class WeightsBeside:
    """One file that holds weights of a model; checked before it is first read, and again when it has changed."""

    def __init__(self, folder: Path, location: str, linked: WeightsFile | None, written: DataFile | None) -> None:
        self.path = folder / location
        self._folder, self._location = folder, location
        self._linked, self._written = linked, written
        self._spans: set[tuple[int, int]] = set()
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
        self._spans.add((begin, begin + size))

    def fault(self) -> str:
        """What is wrong with the file, in a sentence; empty if it may be read."""
        if place := self.outside():
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

    def outside(self) -> str:
        """Why a file at this place may not be read, judged by its name alone; empty if it may."""
        inside = Path(os.path.normpath(self._location))
        first = inside.parts[:1]
        if not self._location or "\0" in self._location or inside.is_absolute() or first in ((), (os.pardir,)):
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

    def _linked_fault(self, recorded: WeightsFile) -> str:
        """How the file differs from the safetensors file that the model was linked to."""
        try:
            found = read_header(self.path)
        except WeightsError:
            found = None
        if found is None or found.header != recorded.header:
            return f"{self.path} was changed after the export: its header differs"
        if self._spans - {(place.offset, place.offset + place.length) for place in found.tensors.values()}:
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


def read_linked(model: ir.Model, folder: Path, *, ours: bool = True) -> None:
    """Make external tensors read from files in or below ``folder``, each file checked first, in place.

    Args:
        ours: Whether the model's records of its data files still hold: a tool that keeps the properties of models may
            have written its own data file under the same name.

    Raises:
        FileFormatError: The model's records of its files are damaged.
    """
    linked = recorded_files(model.metadata_props, keys.WEIGHTS, WeightsFile)
    written = recorded_files(model.metadata_props, keys.DATA, DataFile) if ours else {}
    files: dict[str, WeightsBeside] = {}

    def checked(tensor: ir.ExternalTensor) -> LinkedTensor:
        place = str(tensor.location)
        if place not in files:
            files[place] = WeightsBeside(folder, place, linked.get(place), written.get(place))
        files[place].add(tensor)
        return LinkedTensor(tensor, files[place], folder)

    tensors = {value: value.const_value for value in initializers(model)}
    bind_tensors({value: checked(t) for value, t in tensors.items() if isinstance(t, ir.ExternalTensor)})
    for node, attribute, held in _tensor_attributes(model):
        if any(isinstance(tensor, ir.ExternalTensor) for tensor in held):
            read = [checked(tensor) if isinstance(tensor, ir.ExternalTensor) else tensor for tensor in held]
            value = read[0] if attribute.type is ir.AttributeType.TENSOR else read
            node.attributes[attribute.name] = ir.Attr(attribute.name, attribute.type, value)


def _tensor_attributes(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Attr, Sequence[ir.TensorProtocol]]]:
    """Each attribute that holds tensors, with its node and the tensors."""
    for node in all_nodes(model):
        for attribute in list(node.attributes.values()):
            if attribute.type is ir.AttributeType.TENSOR and not attribute.is_ref():
                yield node, attribute, [attribute.as_tensor()]
            elif attribute.type is ir.AttributeType.TENSORS and not attribute.is_ref():
                yield node, attribute, attribute.as_tensors()


def recorded_files(properties: Mapping[str, str], key: str, kind: type[T]) -> dict[str, T]:
    """The records of a model's weights files in its properties, by location.

    Args:
        key: The property, :data:`keys.WEIGHTS` or :data:`keys.DATA`.
        kind: What it holds of each file.

    Raises:
        FileFormatError: It is damaged.
    """
    try:
        text = properties.get(key, "{}")
        return decode_json(text, kind=dict[str, kind])  # type: ignore[valid-type]  # a variable, for msgspec
    except (msgspec.DecodeError, UnicodeError) as error:
        raise FileFormatError(f"the property {key} is damaged ({error}): export it again") from error


def _external_tensors(model: ir.Model) -> list[ir.ExternalTensor]:
    tensors = [value.const_value for value in initializers(model)]
    tensors += [tensor for _, _, held in _tensor_attributes(model) for tensor in held]
    return [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]


def _weights_beside(tensors: Iterable[ir.ExternalTensor]) -> list[WeightsBeside]:
    """The files that hold the weights of a model that was read from a file."""
    return list(dict.fromkeys(tensor.beside for tensor in tensors if isinstance(tensor, LinkedTensor)))


def check_files(model: ir.Model) -> None:
    """Refuse a model whose weights files are missing, too short, or changed since it was exported.

    Raises:
        FileFormatError: Names each such file.
    """
    if faults := changed_files(model):
        raise FileFormatError(f"{'; '.join(faults)}: put the files back, or export again")


def changed_files(model: ir.Model) -> list[str]:
    """What is wrong with a model's weights files, one sentence for each file.

    A linked file must have the size and the header that it had when the model was exported. A change of its weights
    alone, in place, is not detected; :func:`modelexport.verify.verify.verify` compares them.
    """
    tensors = _external_tensors(model)
    faults = [fault for beside in _weights_beside(tensors) if (fault := beside.fault())]
    others = {Path(tensor.path): None for tensor in tensors if not isinstance(tensor, LinkedTensor)}
    return faults + [f"{file}, which holds weights, is missing" for file in others if not file.is_file()]


def check_weights(model: ir.Model, *, missing: bool = False) -> None:
    """Fail if a weights file of a model that was read from a file may not be read.

    Args:
        missing: Fail also if one does not exist; else that is reported when it is needed.

    Raises:
        FileFormatError: Names the file and the reason.
    """
    for beside in _weights_beside(_external_tensors(model)):
        if missing or beside.outside() or beside.path.exists():
            beside.check()


def names_other_files(path: Path) -> bool:
    """Whether a model may have weights in other files: the key of every reference to one occurs in it."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        return size > 0 and mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ).find(b"location") >= 0


def data_files(path: Path) -> list[Path]:
    """The weights files that a model names, whether or not they exist.

    Raises:
        FileFormatError: It is not an ONNX file.
    """
    tensors = serialized_tensors(read_serialized(path)) if names_other_files(path) else ()
    locations = {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}
    return [path.parent / location for location in sorted(locations) if "\0" not in location]


def record_data(model: ir.Model, data: Path) -> None:
    """Append the digest of a data file to its content, which tells it from every other, and record it in its model.

    ONNX ignores bytes after the last tensor. Two files of the same content stay equal.
    """
    with data.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    with data.open("ab") as file:
        file.write(digest.digest())
    sealed = DataFile(data.stat().st_size, digest.hexdigest())
    model.metadata_props[keys.DATA] = msgspec.json.encode({data.name: sealed}).decode()


def clone_or_link(source: Path, target: Path) -> Literal["clone", "hard link"]:
    """Make ``target`` a clone of ``source`` where the file system supports it, otherwise a hard link.

    Raises:
        OSError: The file system supports neither.
    """
    if clone(source, target):
        return "clone"
    os.link(source, target)
    return "hard link"


def clone(source: Path, target: Path) -> bool:
    """Make ``target`` a file that shares the blocks of ``source``; returns whether the file system supports it."""
    if sys.platform != "linux":
        return False
    import fcntl

    with source.open("rb") as old, target.open("wb") as new:
        try:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        except OSError:
            target.unlink()
            return False
    return True

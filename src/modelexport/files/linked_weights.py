"""Weights in files beside a model: how they are read and linked.

A model names the files that hold its weights, and a model may come from an untrusted source. Each file has to be a
regular file inside the model's folder, with the size and content that the model recorded when it was written.
"""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import mmap
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Literal

import numpy as np
import onnx_ir as ir

from modelexport.errors import FileFormatError
from modelexport.files.external_data import WAY_OUT, ExternalDataFile
from modelexport.files.protobuf_reading import read_serialized, serialized_tensors
from modelexport.files.regular_files import entry_of, is_file, open_regular
from modelexport.format import keys
from modelexport.format.documents import DataFile, WeightsFile
from modelexport.graph.bound_tensors import bind_tensors
from modelexport.graph.nodes import all_nodes, held_initializers
from modelexport.graph.properties import recorded

_FICLONE = 0x40049409
"""The Linux ioctl that makes a file share the blocks of another until one of them is written to."""


class LinkedTensor(ir.ExternalTensor):
    """External data that is checked before it is read; no file stays open for it.

    ``onnx_ir`` refuses every file with several hard links, which a linked checkpoint has; :class:`ExternalDataFile`
    decides which of them may be read.
    """

    def __init__(self, tensor: ir.ExternalTensor, data_file: ExternalDataFile, folder: Path) -> None:
        super().__init__(
            tensor.location,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=tensor.name,
            doc_string=tensor.doc_string,
            base_dir=folder,
        )
        self.data_file = data_file

    def _in_file(self) -> ir.ExternalTensor:
        if not self.valid():
            raise FileFormatError(f"{self.path} has been replaced since it was read: read it again")
        self.data_file.check()
        # Without a folder onnx_ir makes no checks of its own.
        path = os.path.abspath(self.path)  # noqa: PTH100 - keeps symbolic links
        shape = ir.Shape(self.shape.numpy())
        return ir.ExternalTensor(path, self.offset, self.length, self.dtype, shape=shape, name=self.name)

    def __array__(self, dtype: np.dtype | None = None) -> np.ndarray:
        return self._in_file().__array__(dtype)

    def numpy(self) -> np.ndarray:
        """The array, mapped from the file."""
        return self._in_file().numpy()

    def tobytes(self) -> bytes:
        """The bytes."""
        return self._in_file().tobytes() if self.nbytes else b""

    def tofile(self, file: IO[bytes]) -> None:
        """Write the bytes without holding them in memory."""
        if self.nbytes:
            self._in_file().tofile(file)


class LinkedAttribute(ir.LazyTensor):
    """External data of an attribute. It is written into each new model file: only initializers have files beside it."""

    def __init__(self, linked: LinkedTensor) -> None:
        def read() -> ir.TensorProtocol:
            return ir.Tensor(linked.numpy(), linked.dtype, name=linked.name)

        super().__init__(read, linked.dtype, ir.Shape(linked.shape.numpy()), name=linked.name)
        self.linked = linked


class TextTensor(ir.StringTensor):
    """A tensor of texts whose array has texts, with which operators compute, and that has bytes, by which tensors of
    any type are compared.
    """

    def numpy(self) -> np.ndarray:
        """The texts."""
        texts = [text.decode() for text in self.string_data()]
        return np.array(texts, object).reshape(self.shape.numpy())

    def tobytes(self) -> bytes:
        """The texts, each after its length."""
        return b"".join(len(text).to_bytes(8, "little") + text for text in self.string_data())


def read_linked(model: ir.Model, folder: Path, *, ours: bool = True) -> None:
    """Make external tensors read from files in or below ``folder``, each file checked first, and give tensors of texts
    bytes, in place.

    Args:
        ours: Whether the model's records of its data files still hold: a tool that keeps the properties of models may
            have written its own data file under the same name.

    Raises:
        FileFormatError: The model's records of its files are damaged.
    """
    linked: dict[str, WeightsFile] = recorded(model, keys.WEIGHTS) or {}
    written: dict[str, DataFile] = (recorded(model, keys.DATA) or {}) if ours else {}
    files: dict[str, ExternalDataFile] = {}

    def checked(tensor: ir.ExternalTensor) -> LinkedTensor:
        place = str(tensor.location)
        if place not in files:
            files[place] = ExternalDataFile(folder, place, linked.get(place), written.get(place))
        files[place].add(tensor)
        return LinkedTensor(tensor, files[place], folder)

    def with_bytes(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        if isinstance(tensor, ir.StringTensor):
            shape = ir.Shape(tensor.shape.numpy())
            return TextTensor(tensor.string_data(), shape=shape, name=tensor.name, doc_string=tensor.doc_string)
        return checked(tensor) if isinstance(tensor, ir.ExternalTensor) else tensor

    tensors = {value: value.const_value for value in held_initializers(model) if value.const_value is not None}
    bind_tensors({value: with_bytes(t) for value, t in tensors.items() if isinstance(t, _READ_OTHERWISE)})
    for node, attribute, held in _tensor_attributes(model):
        if any(isinstance(tensor, _READ_OTHERWISE) for tensor in held):
            read = [with_bytes(tensor) for tensor in held]
            read = [LinkedAttribute(tensor) if isinstance(tensor, LinkedTensor) else tensor for tensor in read]
            value = read[0] if attribute.type is ir.AttributeType.TENSOR else read
            node.attributes[attribute.name] = ir.Attr(attribute.name, attribute.type, value)


_READ_OTHERWISE = (ir.ExternalTensor, ir.StringTensor)


def _tensor_attributes(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Attr, Sequence[ir.TensorProtocol]]]:
    """Each attribute that holds tensors, with its node and the tensors."""
    for node in all_nodes(model):
        for attribute in list(node.attributes.values()):
            if attribute.type is ir.AttributeType.TENSOR and not attribute.is_ref():
                yield node, attribute, [attribute.as_tensor()]
            elif attribute.type is ir.AttributeType.TENSORS and not attribute.is_ref():
                yield node, attribute, attribute.as_tensors()


def _external_tensors(model: ir.Model) -> list[ir.ExternalTensor]:
    tensors = [value.const_value for value in held_initializers(model)]
    tensors += [tensor for _, _, held in _tensor_attributes(model) for tensor in held]
    tensors = [tensor.linked if isinstance(tensor, LinkedAttribute) else tensor for tensor in tensors]
    return [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]


def check_weights_files(model: ir.Model) -> None:
    """Refuse a model whose weights files are missing, too short, or changed since it was exported."""
    if faults := weights_faults(model):
        raise FileFormatError(f"{'; '.join(faults)}: {WAY_OUT}")


def weights_faults(model: ir.Model) -> list[str]:
    """What is wrong with a model's weights files, one sentence for each file.

    A linked file must have the size, the header and the samples of its weights that it had when the model was exported.
    A change between the samples is not detected; :func:`modelexport.verify.verify.verify` compares all weights.
    """
    tensors = _external_tensors(model)
    files = dict.fromkeys(tensor.data_file for tensor in tensors if isinstance(tensor, LinkedTensor))
    others = {Path(tensor.path): None for tensor in tensors if not isinstance(tensor, LinkedTensor)}
    missing = [f"{file}, which holds weights, is missing" for file in others if not file.is_file()]
    return [fault for file in files if (fault := file.fault())] + missing


def check_present_weights_files(model: ir.Model) -> None:
    """Fail if an existing weights file of a model that was read from a file may not be read.

    One that does not exist is reported when it is needed.

    Raises:
        FileFormatError: Names the file and the reason.
    """
    tensors = _external_tensors(model)
    for file in dict.fromkeys(tensor.data_file for tensor in tensors if isinstance(tensor, LinkedTensor)):
        if file.outside() or file.path.exists():
            file.check()


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


def model_with_weights_in(places: Collection[Path], apart_from: Collection[Path] = ()) -> tuple[Path, Path] | None:
    """A model that has weights in one of some files, and that file: a model in the same folder, or in one above it.

    Args:
        places: Files that are about to be replaced or removed.
        apart_from: Models that do not count, because they are replaced or removed with them.
    """
    there = {entry: place for place in places if (entry := entry_of(place)) is not None}
    own = {entry_of(model) for model in apart_from}
    named = {place.absolute().parent for place in there.values()}
    folders = named | {Path(os.path.realpath(folder)) for folder in named}
    above = {parent for folder in folders for parent in folder.parents} - folders
    for folder in (*sorted(folders), *sorted(above)):
        with contextlib.suppress(OSError):
            for model in sorted(folder.iterdir()):
                if entry_of(model) not in own and _may_be_model(model):
                    with contextlib.suppress(FileFormatError):
                        for file in data_files(model):
                            for entry in (entry_of(file), entry_of(Path(os.path.realpath(file)))):
                                if entry is not None and entry in there:
                                    return model, there[entry]
    return None


def _may_be_model(path: Path) -> bool:
    """Whether a file has the suffix of a model, or begins as most do (a backup may have any name)."""
    if not is_file(path) or path.suffix == ".onnx":
        return is_file(path)
    with contextlib.suppress(OSError, FileFormatError), open_regular(path) as file:
        return file.read(1) == b"\x08"
    return False


def seal(data: Path) -> DataFile:
    """Append the digest of a data file to its content, which tells it from every other; returns its record.

    ONNX ignores bytes after the last tensor. Two files of the same content stay equal.
    """
    with data.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    with data.open("ab") as file:
        file.write(digest.digest())
    return DataFile(data.stat().st_size, digest.hexdigest())


def free_place(output: Path, staging: Path, source: Path, name: str) -> Path:
    """A place in ``staging`` for a weights file of the model ``output``, after which it is named.

    What has this name beside ``output`` keeps it, unless it is a weights file of an earlier model of that name alone,
    and its bytes are elsewhere as well: an earlier model may have been exported into the folder of its checkpoint.

    Args:
        source: The file that will be linked there.
        name: Its name.
    """
    former: list[Path] = []
    with contextlib.suppress(FileFormatError):
        former = data_files(output) if output.is_file() else []

    def may_have(old: Path) -> bool:
        if not os.path.lexists(old):
            return True
        if old not in former or model_with_weights_in([old], [output]) is not None:
            return False
        return old.stat().st_nlink > 1 or filecmp.cmp(old, source, shallow=False)

    name = name.removeprefix(f"{output.stem}.")
    numbered = (f"{output.stem}.{number}{name}" for number in ("", *(f"{count}." for count in range(2, 10**6))))
    beside = ((staging / candidate, output.parent / candidate) for candidate in numbered)
    return next(new for new, old in beside if not new.exists() and may_have(old))


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

"""Models made of parts of another, whose weights stay in the files where they are."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import onnx_ir as ir

from modelexport.errors import FileFormatError, OutputError
from modelexport.files.linked import linked_files
from modelexport.files.links import clone, clone_or_link
from modelexport.files.onnx_models import LARGEST_INSIDE, save_model, save_with_references
from modelexport.format import documents, keys
from modelexport.graph.nodes import initializers
from modelexport.surgery import Sharing


class SharedFiles:
    """The weights files of one model, brought into the folder of files that are made of it."""

    def __init__(self, source: Path, model: ir.Model, folder: Path, staging: Path, sharing: Sharing = "auto") -> None:
        self._source = source
        self._folder, self._staging, self._sharing = folder, staging, sharing
        self._recorded = linked_files(model)
        self._placed: dict[str, str | None] = {}
        self.files: dict[str, documents.WeightsFile] = {}
        """The location of each file that was brought in or is there, seen from the folder."""

    def save(self, model: ir.Model, name: str) -> list[str]:
        """Write a model to the staging folder; returns the files with weights beside it.

        Raises:
            FileFormatError: A file that holds weights is missing or too short.
            OutputError: They have to be linked and cannot be.
        """
        values = [value for value in initializers(model) if value.const_value is not None]
        tensors = {value: value.const_value for value in values}
        locations = {
            value: self._place(tensor) for value, tensor in tensors.items() if isinstance(tensor, ir.ExternalTensor)
        }
        if not locations or None in locations.values():
            save_model(model, self._staging / name)
            return [f"{name}.data"] if (self._staging / f"{name}.data").exists() else []
        inside = sum(tensor.nbytes for value, tensor in tensors.items() if tensor and value not in locations)
        if inside > LARGEST_INSIDE:
            save_model(model, self._staging / name, external=True)
            return [f"{name}.data"]
        used = {location for location in locations.values() if location is not None}
        model.metadata_props[keys.WEIGHTS] = msgspec.json.encode({name: self.files[name] for name in used}).decode()
        for value, location in locations.items():
            tensor = tensors[value]
            assert isinstance(tensor, ir.ExternalTensor) and location is not None
            value.const_value = ir.ExternalTensor(
                location,
                tensor.offset,
                tensor.length,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=value.name or "",
                base_dir=self._folder,
            )
        save_with_references(model, self._staging / name)
        return sorted(used)

    def _place(self, tensor: ir.ExternalTensor) -> str | None:
        """Where the file of a tensor is, seen from the folder; ``None`` if it is not to be or cannot be linked."""
        check_reaches(tensor, self._source)
        real = os.path.realpath(tensor.path)
        if real not in self._placed:
            record = self._recorded.get(str(tensor.location))
            self._placed[real] = location = self._bring(Path(real), Path(tensor.location).name, record is not None)
            if location is not None:
                size = Path(real).stat().st_size
                self.files[location] = record or documents.WeightsFile(size, "")
        return self._placed[real]

    def _bring(self, real: Path, name: str, is_checkpoint: bool) -> str | None:
        """Give a file a name in the folder.

        A file that belongs to the model alone gets no hard link unless that is asked for: onnx's own tools would then
        refuse to read the model that it belongs to.
        """
        folder = Path(os.path.realpath(self._folder))
        if self._sharing == "copy":
            return None
        if real.is_relative_to(folder):
            return real.relative_to(folder).as_posix()
        target = self._staging / name
        number = 1
        while target.exists():
            number += 1
            target = self._staging / f"{number}.{name}"
        try:
            if self._sharing == "link" or is_checkpoint:
                clone_or_link(real, target)
            elif not clone(real, target):
                return None
        except OSError as error:
            if self._sharing == "auto":
                return None
            raise OutputError(
                f"{real} cannot be linked into {self._folder} ({error.strerror}): write to the folder of the weights "
                "or above, or copy them with --weights copy"
            ) from error
        return target.name


def size_of_weights(model: ir.Model, source: Path) -> int:
    """Bytes of a model's initializers.

    Raises:
        FileFormatError: A file that holds some of them is missing or too short.
    """
    size = 0
    for value in initializers(model):
        tensor = value.const_value
        if tensor is None:
            raise FileFormatError(f"{source} has no value for '{value.name}': export it again with its weights")
        size += tensor.nbytes
        if isinstance(tensor, ir.ExternalTensor):
            check_reaches(tensor, source)
    return size


def check_reaches(tensor: ir.ExternalTensor, source: Path) -> None:
    """Refuse a tensor whose file is missing or too short.

    Raises:
        FileFormatError: It is.
    """
    path = Path(tensor.path)
    end = (tensor.offset or 0) + (tensor.length or tensor.nbytes)
    if not path.is_file() or path.stat().st_size < end:
        fault = "too short" if path.is_file() else "missing"
        raise FileFormatError(f"{path}, which holds weights of {source}, is {fault}: put it back beside it")

"""Saves models that were edited, or made from parts of another; their weights stay in their files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from modelexport.errors import FileFormatError, OutputError
from modelexport.files.linked_weights import LinkedTensor, check_weights_files, clone, clone_or_link, free_place
from modelexport.files.onnx_models import fits_inside, record_documents, save_model, save_with_references
from modelexport.format import keys
from modelexport.format.documents import DataFile, WeightsFile
from modelexport.graph.nodes import initializers, stored_tensors
from modelexport.graph.properties import record
from modelexport.regions import Sharing
from modelexport.tagged.documents.encoded_documents import documents_after
from modelexport.tagged.documents.export_facts import ExportFacts
from modelexport.tagged.file import TaggedFile
from modelexport.weights.linked_copied_embedded import in_file


class SharedFiles:
    """Links or clones the weights files of one model into the folder of models that are made from it.

    They are named after the model that is written, except in the folder of a package, where several models use them.
    """

    def __init__(self, output: Path, staging: Path, sharing: Sharing = "auto") -> None:
        """Begin.

        Args:
            output: The file to write, or the folder of a package.
        """
        self._output = None if output.is_dir() else output
        self._folder = output if self._output is None else output.parent
        self._staging, self._sharing = staging, sharing
        self._placed: dict[Path, str | None] = {}

    def save(self, model: ir.Model, name: str, beside: Mapping[str, bytes] | None = None) -> list[str]:
        """Write a model to the staging folder; returns the weights files beside it.

        Args:
            beside: The documents that are written with it: the end of each name to the content.

        Raises:
            FileFormatError: A weights file is missing or has changed.
            OutputError: The files must be linked but cannot be.
        """
        for suffix, content in (beside or {}).items():
            (self._staging / name).with_suffix(suffix).write_bytes(content)
        check_weights_files(model)
        tensors = {value: value.const_value for value in initializers(model) if value.const_value is not None}
        external = {value: tensor for value, tensor in tensors.items() if isinstance(tensor, ir.ExternalTensor)}
        locations = {value: self._place(tensor) for value, tensor in external.items()}
        inside = sum(tensor.nbytes for value, tensor in tensors.items() if value not in external)
        if not external or None in locations.values() or not fits_inside(inside):
            save_model(model, self._staging / name, documents=beside)
            return [f"{name}.data"] if (self._staging / f"{name}.data").exists() else []
        placed: dict[ir.Value, ir.TensorProtocol] = {}
        records: dict[str, dict[str, WeightsFile | DataFile]] = {keys.WEIGHTS: {}, keys.DATA: {}}
        for value, tensor in external.items():
            location = str(locations[value])
            placed[value] = in_file(location, tensor, value.name or "", self._folder)
            if isinstance(tensor, LinkedTensor) and tensor.data_file.linked is not None:
                records[keys.WEIGHTS][location] = tensor.data_file.linked
            if isinstance(tensor, LinkedTensor) and tensor.data_file.written is not None:
                records[keys.DATA][location] = tensor.data_file.written
        record_documents(model, beside or {})
        for key, files in records.items():
            record(model, key, files or None)
        save_with_references(model, self._staging / name, placed)
        return sorted({str(location) for location in locations.values()})

    def _place(self, tensor: ir.ExternalTensor) -> str | None:
        """Link or clone a tensor's file into the folder; returns its location, or ``None`` if it should not be linked.

        A file that belongs only to the model is not hard-linked unless requested: onnx's own tools would then refuse to
        read the model that it belongs to.
        """
        real, folder = Path(os.path.realpath(tensor.path)), Path(os.path.realpath(self._folder))
        beside = tensor.data_file if isinstance(tensor, LinkedTensor) else None
        known = beside is not None and (beside.linked or beside.written)
        if self._sharing == "link" and not known:
            raise OutputError(
                f"{real} was not written by modelexport, so nothing tells whether it changes: use --weights copy"
            )
        if self._sharing == "copy" or not known:
            return None
        if real.is_relative_to(folder):
            return real.relative_to(folder).as_posix()
        if real in self._placed:
            return self._placed[real]
        name, self._placed[real] = Path(tensor.location).name, None
        if self._output is not None:
            target = free_place(self._output, self._staging, real, name)
        else:
            names = (name, *(f"{number}.{name}" for number in range(2, len(self._placed) + 3)))
            target = next(target for target in map(self._staging.joinpath, names) if not target.exists())
        try:
            if self._sharing == "link" or (beside is not None and beside.linked is not None):
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
        self._placed[real] = target.name
        return target.name


def save_edited(
    edited: TaggedFile, facts: ExportFacts | None, output: Path, staging: Path, sharing: Sharing = "auto"
) -> list[str]:
    """Write an edited file and its documents into a folder; returns the weights files beside it.

    Args:
        edited: The file, with the path that it was read from.
        facts: What is known of it besides its graph, taken before it was edited.
        output: The file that they will be moved to.
    """
    model = edited.encoded()  # functions give nodes other names, which the documents have
    beside = documents_after(edited.path, facts, edited.model, edited.call_tags)
    return SharedFiles(output, staging, sharing).save(model, output.name, beside)


def size_of_weights(model: ir.Model, source: Path) -> int:
    """Bytes of a model's initializers and constants."""
    check_weights_files(model)
    for value in initializers(model):
        if value.const_value is None:
            raise FileFormatError(f"{source} has no value for '{value.name}': export it again with its weights")
    return sum(tensor.nbytes for _, tensor in stored_tensors(model))

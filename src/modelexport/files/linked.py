"""Weights in safetensors files beside a model: read there, and checked for changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir

from modelexport.errors import WeightsError
from modelexport.files.safetensors_files import read_header
from modelexport.format import documents, keys
from modelexport.graph.nodes import initializers


class LinkedTensor(ir.ExternalTensor):
    """External data in a file that may have other hard links, as a linked checkpoint has.

    ``onnx_ir`` refuses to read those beside a model: whoever wrote the model might have made it a second name of a file
    that others should not read. Here the model says itself which safetensors files it was linked to.
    """

    def _in_file(self) -> ir.ExternalTensor:
        # Without a folder there is no such check.
        path = os.path.abspath(self.path)  # noqa: PTH100 - symbolic links stay
        shape = ir.Shape(self.shape.numpy())
        return ir.ExternalTensor(path, self.offset, self.length, self.dtype, shape=shape, name=self.name)

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return self._in_file().__array__(dtype)

    def numpy(self) -> np.ndarray:
        """The array, mapped from the file."""
        return self._in_file().numpy()

    def tobytes(self) -> bytes:
        """The bytes."""
        return self._in_file().tobytes()

    def tofile(self, file: Any) -> None:
        """Write the bytes, without holding them."""
        self._in_file().tofile(file)


def linked_files(model: ir.Model) -> dict[str, documents.WeightsFile]:
    """The safetensors files that a model was linked to when it was exported, by location."""
    text = model.metadata_props.get(keys.WEIGHTS, "{}")
    return msgspec.json.decode(text, type=dict[str, documents.WeightsFile])


def read_linked(model: ir.Model, folder: Path) -> None:
    """Let the initializers that are linked to safetensors files in or below ``folder`` be read, in place."""
    inside = Path(os.path.realpath(folder))
    readable = {
        location for location in linked_files(model) if Path(os.path.realpath(folder / location)).is_relative_to(inside)
    }
    for value in initializers(model) if readable else ():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and str(tensor.location) in readable:
            value.const_value = LinkedTensor(
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


def changed_files(path: Path, model: ir.Model) -> list[str]:
    """What is wrong with the files that a model's weights are in, a sentence for each file.

    A linked file has to be as large as it was when the model was exported and to have the same header. A change of its
    weights alone, in place, is not seen here; :func:`modelexport.verify.model.verify` compares them.
    """
    recorded = linked_files(model)
    ends: dict[str, int] = {}
    for value in initializers(model):
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            end = (tensor.offset or 0) + (tensor.nbytes if tensor.length is None else tensor.length)
            ends[str(tensor.location)] = max(ends.get(str(tensor.location), 0), end)
    return [
        fault
        for location, end in ends.items()
        if (fault := _fault(path.parent / location, end, recorded.get(location)))
    ]


def _fault(file: Path, end: int, recorded: documents.WeightsFile | None) -> str:
    if not file.is_file():
        return f"{file}, which holds weights, is missing"
    size = file.stat().st_size
    if recorded is not None and size != recorded.size:
        return f"{file} was changed after the export: it has {size:,} bytes and had {recorded.size:,}"
    if size < end:
        return f"{file} is cut off: it has {size:,} bytes and the model's weights end at {end:,}"
    if recorded is not None and recorded.header:
        try:
            same = read_header(file).header == recorded.header
        except WeightsError:
            same = False
        if not same:
            return f"{file} was changed after the export: its header is another"
    return ""

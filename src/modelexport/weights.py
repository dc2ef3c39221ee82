"""Weights that stay in the files of a checkpoint: where each ``state_dict`` entry lies, or how it is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir

from modelexport import schema
from modelexport.graph import initializers
from modelexport.safetensors_files import SafetensorsFile


@dataclass(frozen=True)
class Weights:
    """The ``state_dict`` entries of a model that was built without them. Its other entries are in memory."""

    tensors: Mapping[str, ir.TensorProtocol]
    """Key to an ``ir.ExternalTensor``, a place in a file, or an ``ir.LazyTensor``, which is made from several or by a
    conversion each time it is read."""
    made: Mapping[str, str]
    """The keys of the second kind to the names of the operations that make them."""
    files: tuple[SafetensorsFile, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all entries, those of a tied parameter counted once for each name."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


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


def linked_files(model: ir.Model) -> dict[str, schema.WeightsFile]:
    """The safetensors files that a model was linked to when it was exported, by location."""
    text = model.metadata_props.get(schema.WEIGHTS, "{}")
    return msgspec.json.decode(text, type=dict[str, schema.WeightsFile])


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

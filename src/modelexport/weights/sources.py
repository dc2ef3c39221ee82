"""Weights that stay in the files of a checkpoint: where each ``state_dict`` entry lies, or how it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from modelexport.files.safetensors_files import SafetensorsFile


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

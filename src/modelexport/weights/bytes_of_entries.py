"""During an export: where the bytes of each ``state_dict`` entry are (in memory, in a file, or computed)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from modelexport.files.safetensors_files import SafetensorsFile


@dataclass(frozen=True)
class Weights:
    """The ``state_dict`` entries of a model whose weights are in files. Its other entries are in memory."""

    tensors: Mapping[str, ir.TensorProtocol]
    """Key to an ``ir.ExternalTensor``, a place in a file, or to an ``ir.LazyTensor``, which is computed by a conversion
    or from several tensors each time it is read."""
    made: Mapping[str, str]
    """The keys of the lazy tensors to the names of the operations that compute them."""
    files: tuple[SafetensorsFile, ...]
    in_memory: bool = False
    """Whether the model has its weights as well, so that it can run."""

    @property
    def nbytes(self) -> int:
        """Bytes of all entries, those of a tied parameter counted once for each name."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def stays_in_file(tensor: ir.TensorProtocol | None) -> bool:
    """Whether the bytes of a tensor stay in a file, so that nothing may be computed from them."""
    return isinstance(tensor, (ir.ExternalTensor, ir.LazyTensor))

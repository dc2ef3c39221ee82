"""Writing the entries of a model's ``state_dict`` to one file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from modelexport.errors import OutputError
from modelexport.pytorch.lazy_weights import read_tensor
from modelexport.weights.sources import Weights


def save_entries(model: nn.Module, source: Weights | None, path: Path) -> dict[str, str]:
    """Write a model's entries to a safetensors file; entries that are the same tensor are written once.

    Args:
        source: The places of the entries if the model was built without weights.

    Returns:
        Each ``state_dict`` key to its name in the file.

    Raises:
        OutputError: The file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    names: dict[str, str] = {}
    first: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
    tensors: dict[str, torch.Tensor] = {}
    apart = source.tensors if source is not None else {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor) or not tensor.numel():
            continue
        # A view with another shape or order is a separate entry.
        same = (tensor.data_ptr(), tensor.shape, tensor.stride())
        names[key] = first.setdefault(same, key)
        if names[key] == key:
            value = read_tensor(apart[key]) if key in apart else tensor.detach()
            # Entries may share memory, which the format does not allow.
            tensors[key] = value.contiguous() if value.untyped_storage().nbytes() == value.nbytes else value.clone()
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except (SafetensorError, OSError) as error:
        raise OutputError(f"cannot write {path}: {error}") from error
    return names

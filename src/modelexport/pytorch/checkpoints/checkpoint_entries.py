"""The entries of a model's ``state_dict`` in files: written to one, or found in those that are there."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from modelexport.files.safetensors_files import SafetensorsFile, TensorLocation, errors_of_writing
from modelexport.format.dtypes import dtype_name
from modelexport.pytorch.checkpoints.lazy_weights import read_tensor
from modelexport.weights.bytes_of_entries import Weights


def save_entries(model: nn.Module, source: Weights | None, path: Path) -> dict[str, str]:
    """Write a model's entries to a safetensors file; entries that are the same tensor are written once.

    Args:
        source: The places of the entries if the model was built without weights.

    Returns:
        Each ``state_dict`` key to its name in the file.
    """
    from safetensors.torch import save_file

    names: dict[str, str] = {}
    first: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
    tensors: dict[str, torch.Tensor] = {}
    apart = source.tensors if source is not None else {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor) or not tensor.numel():
            continue
        # A view with another shape or order is a separate entry.
        names[key] = first.setdefault(_identity(tensor), key)
        if names[key] == key:
            value = read_tensor(apart[key]) if key in apart else tensor.detach()
            # Entries may share memory, which the format does not allow.
            tensors[key] = value.contiguous() if value.untyped_storage().nbytes() == value.nbytes else value.clone()
    with errors_of_writing():
        save_file(tensors, path, metadata={"format": "pt"})
    return names


def find_entries(model: nn.Module, files: Sequence[SafetensorsFile]) -> dict[str, TensorLocation] | None:
    """The places of a model's entries in files that have all of them unchanged; ``None`` if one is not there.

    A loader may rename entries: one whose name no file has is found by its content, if no other entry has the same.
    """
    named: dict[str, list[TensorLocation]] = {}
    for file in files:
        for name, place in file.tensors.items():
            named.setdefault(name, []).append(place)
    entries = {
        key: tensor.detach()
        for key, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor) and tensor.numel()
    }
    places: dict[str, TensorLocation] = {}
    for key, tensor in entries.items():
        if (there := next((place for place in named.get(key, ()) if _is_there(tensor, place)), None)) is not None:
            places[key] = there
    tied = {_identity(entries[key]): place for key, place in places.items()}
    for key, tensor in entries.items():
        if key not in places:
            other = tied.get(_identity(tensor)) or _under_another_name(key, tensor, named, set(places.values()))
            if other is None:
                return None
            places[key] = tied[_identity(tensor)] = other
    return places


def _under_another_name(
    key: str, tensor: torch.Tensor, named: Mapping[str, Sequence[TensorLocation]], taken: Collection[TensorLocation]
) -> TensorLocation | None:
    """The place with the content of an entry whose name ends most like the entry's."""
    candidates = [
        (_equal_end(name, key), place)
        for name, places in named.items()
        for place in places
        if place not in taken and _is_there(tensor, place)
    ]
    longest = max((length for length, _ in candidates), default=0)
    best = [place for length, place in candidates if length == longest]
    return best[0] if len(best) == 1 else None


def _equal_end(name: str, other: str) -> int:
    """The number of parts that end two dotted names equally."""
    parts = zip(reversed(name.split(".")), reversed(other.split(".")), strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], parts)))


def _identity(tensor: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _is_there(tensor: torch.Tensor, place: TensorLocation) -> bool:
    """Whether the bytes of a place in a file are those of a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tuple(tensor.shape) != place.shape or dtype != dtype_name(place.dtype):
        return False
    there = np.memmap(place.path, dtype=np.uint8, mode="r", offset=place.offset, shape=(place.length,))
    bytes_of_tensor = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return bool(np.array_equal(there, bytes_of_tensor))

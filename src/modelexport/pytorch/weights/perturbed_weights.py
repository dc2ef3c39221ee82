"""Changed weights for a comparison: fresh biases are zero and norms one, so that swapped ones would go unnoticed."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping
from math import sqrt
from typing import Any

import torch
from torch import nn

_SMALL = 1e-3
"""Numbers below this are initial noise around zero, which is lost in the numbers that they are added to."""


def entries_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every ``state_dict`` entry of a model under all its names, as the model's own tensor."""
    return {key: value for key, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}


def indistinct(model: nn.Module, keys: Collection[str]) -> set[str]:
    """The entries that are constant or nearly zero, or have the values of another that they are not tied to."""
    found: set[str] = set()
    seen: dict[tuple[int, int], list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for key, tensor in entries_of(model).items():
        data = tensor.detach()
        if key not in keys or data.numel() < 2 or data.is_meta:
            continue
        part = _sample(data)
        if _is_small(data) or _is_constant(data, part):
            found.add(key)
            continue
        alike = seen[data.numel(), zlib.crc32(part.tobytes())]
        for other, its in alike:
            if its.data_ptr() != data.data_ptr() and torch.equal(its.reshape(-1), data.reshape(-1)):
                found |= {key, other}
        alike.append((key, data))
    return found


def _size(data: torch.Tensor) -> float:
    """The root mean square of the elements."""
    if data.dtype not in (torch.float32, torch.float64):
        data = data.float()
    return float(torch.linalg.vector_norm(data)) / sqrt(max(data.numel(), 1))


def _is_small(data: torch.Tensor) -> bool:
    part = data.reshape(-1)[: -(-data.numel() // 16)]  # nearly always enough to tell
    return _size(part) * sqrt(part.numel() / data.numel()) < _SMALL and _size(data) < _SMALL


def _is_constant(data: torch.Tensor, part: Any) -> bool:
    return bool((part == part[0]).all()) and bool((data == data.reshape(-1)[0]).all())


def _sample(data: torch.Tensor) -> Any:
    """Some elements, of all parts of a tensor."""
    flat = data.reshape(-1)
    return flat[:: max(flat.numel() // _SAMPLE, 1)].float().cpu().numpy()


_SAMPLE = 1024


def perturbed(model: nn.Module, keys: Collection[str]) -> Mapping[str, torch.Tensor]:
    """Changed values for some entries of a model: a fifth off, with the same signs, zeros a little above or below.

    Returns:
        Every name of these entries to its new tensor; the names of a tied parameter to the same one.
    """
    generator = torch.Generator().manual_seed(12)
    made: dict[int, torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    tensors = {key: tensor for key, tensor in entries_of(model).items() if tensor.is_floating_point()}
    chosen = {(tensor.data_ptr(), tensor.shape) for key, tensor in tensors.items() if key in keys}
    for key, tensor in tensors.items():
        if (tensor.data_ptr(), tensor.shape) not in chosen:
            continue
        if tensor.data_ptr() not in made:
            data = tensor.detach().float().cpu()
            noise = torch.randn(min(data.numel(), _PERIOD), generator=generator)
            other = _repeated(torch.exp(0.2 * noise.clamp(-2, 2)), data.shape).mul_(data)
            if _size(data) < _SMALL:
                other.add_(_repeated(noise, data.shape), alpha=0.05)
            elif int(torch.count_nonzero(data)) < data.numel():
                other = torch.where(data == 0, 0.05 * _repeated(noise, data.shape), other)
            made[tensor.data_ptr()] = other.to(tensor.dtype).to(tensor.device)
        found[key] = made[tensor.data_ptr()]
    return found


_PERIOD = 65_537
"""After so many numbers noise begins again: a prime, so that no two rows of a table get the same."""


def _repeated(noise: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    count = shape.numel()
    if not count:
        return torch.empty(shape)
    return noise.repeat(-(-count // noise.numel()))[:count].reshape(shape)

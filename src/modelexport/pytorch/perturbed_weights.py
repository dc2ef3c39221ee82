"""Changed weights for a comparison: fresh biases are zero and norms one, so that swapped ones would go unnoticed."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping
from math import sqrt

import torch
from torch import nn

_SMALL = 1e-3
"""Numbers below this are initial noise around zero, which is lost in the numbers that they are added to."""


def entries_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every ``state_dict`` entry of a model under all its names, as the model's own tensor."""
    return {key: value for key, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}


def indistinct(model: nn.Module, keys: Collection[str]) -> set[str]:
    """The entries that are constant or nearly zero, or have the values of another that they are not tied to."""
    equal_or_constant: set[str] = set()
    seen: dict[tuple[int, int], list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for key, tensor in entries_of(model).items():
        data = tensor.detach()
        if key not in keys or data.numel() < 2 or data.is_meta:
            continue
        flat = data.reshape(-1)
        some = flat[:: max(flat.numel() // _SAMPLE, 1)].float().cpu().numpy()  # of all parts of the tensor
        if _is_small(data) or ((some == some[0]).all() and bool((flat == flat[0]).all())):
            equal_or_constant.add(key)
            continue
        alike = seen[data.numel(), zlib.crc32(some.tobytes())]
        for other, its in alike:
            if its.data_ptr() != data.data_ptr() and torch.equal(its.reshape(-1), flat):
                equal_or_constant |= {key, other}
        alike.append((key, data))
    return equal_or_constant


_SAMPLE = 1024
"""The number of elements by which tensors are compared first."""


def _size(data: torch.Tensor) -> float:
    """The root mean square of the elements."""
    if data.dtype not in (torch.float32, torch.float64):
        data = data.float()
    return float(torch.linalg.vector_norm(data)) / sqrt(max(data.numel(), 1))


def _is_small(data: torch.Tensor) -> bool:
    part = data.reshape(-1)[: -(-data.numel() // 16)]  # nearly always enough to tell
    return _size(part) * sqrt(part.numel() / data.numel()) < _SMALL and _size(data) < _SMALL


def perturbed(model: nn.Module, keys: Collection[str]) -> Mapping[str, torch.Tensor]:
    """Changed values for some entries of a model: a fifth off, with the same signs, zeros a little above or below.

    Returns:
        Every name of these entries to its new tensor; the names of a tied parameter to the same one.
    """
    generator = torch.Generator().manual_seed(12)
    by_memory: dict[int, torch.Tensor] = {}
    tensors = {key: tensor for key, tensor in entries_of(model).items() if tensor.is_floating_point()}
    chosen = {(tensor.data_ptr(), tensor.shape) for key, tensor in tensors.items() if key in keys}
    tensors = {key: tensor for key, tensor in tensors.items() if (tensor.data_ptr(), tensor.shape) in chosen}
    for tensor in tensors.values():
        if tensor.data_ptr() in by_memory:
            continue
        data = tensor.detach().float().cpu()
        noise = torch.randn(min(data.numel(), _PERIOD), generator=generator)
        other = _repeated(torch.exp(0.2 * noise.clamp(-2, 2)), data.shape).mul_(data)
        if _size(data) < _SMALL:
            other.add_(_repeated(noise, data.shape), alpha=0.05)
        elif int(torch.count_nonzero(data)) < data.numel():
            other = torch.where(data == 0, 0.05 * _repeated(noise, data.shape), other)
        by_memory[tensor.data_ptr()] = other.to(tensor.dtype).to(tensor.device)
    return {key: by_memory[tensor.data_ptr()] for key, tensor in tensors.items()}


_PERIOD = 65_537
"""After so many numbers noise begins again: a prime, so that no two rows of a table get the same."""


def _repeated(noise: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    times = -(-shape.numel() // max(noise.numel(), 1))
    return noise.repeat(times)[: shape.numel()].reshape(shape)

"""Changed weights for a comparison: fresh biases are zero and norms one, so that swapped ones would go unnoticed."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

_WEAK = 0.5
"""The gain below which a matrix is scaled up."""
_SMALL = 1e-3
"""Numbers below this are initial noise around zero, which is lost in the numbers that they are added to."""


def entries_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every ``state_dict`` entry of a model under all its names, as the model's own tensor."""
    return {key: value for key, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}


def _gain(weights: torch.Tensor) -> float:
    """The factor by which a matrix scales a random vector; 1 for other tensors."""
    if weights.ndim < 2 or not weights.numel():
        return 1.0
    inputs = weights.numel() // weights.shape[0]
    mean: float = weights.float().square().mean().item()
    return float((mean * inputs) ** 0.5)


def has_equal_values(model: nn.Module, keys: Collection[str]) -> bool:
    """Whether a parameter is constant or nearly zero, or two parameters that are not tied have the same values."""
    seen: dict[tuple[int, int], int] = {}
    for key, tensor in entries_of(model).items():
        if key not in keys or tensor.numel() < 2 or tensor.is_meta:
            continue
        data = tensor.detach()
        if bool((data == data.reshape(-1)[0]).all()) or bool(data.float().square().mean() < _SMALL**2):
            return True
        numbers = data.float().contiguous().cpu().numpy()
        place = (tensor.data_ptr(), zlib.crc32(numbers.tobytes()))
        others = seen.setdefault((tensor.numel(), place[1]), place[0])
        if others != place[0]:
            return True
    return False


def perturbed(model: nn.Module, keys: Collection[str], *, seed: int = 12) -> Mapping[str, torch.Tensor]:
    """Changed values for some entries of a model: a fifth off, with the same signs, zeros a little above or below.

    Returns:
        Every name of these entries to its new tensor; the names of a tied parameter to the same one.
    """
    generator = torch.Generator().manual_seed(seed)
    made: dict[int, torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for key, tensor in entries_of(model).items():
        if key not in keys or not tensor.is_floating_point():
            continue
        if tensor.data_ptr() not in made:
            data = tensor.detach().float().cpu()
            noise = torch.randn(data.shape, generator=generator)
            other = data * torch.exp(0.2 * noise.clamp(-2, 2))
            nothing = (data == 0) | (data.square().mean() < _SMALL**2)
            other = torch.where(nothing, other + 0.05 * noise, other)
            gain = _gain(other)
            # Small fresh weights leave attention nearly uniform, independent of its scores.
            other = other / gain if 0 < gain < _WEAK else other
            made[tensor.data_ptr()] = other.to(tensor.dtype).to(tensor.device)
        found[key] = made[tensor.data_ptr()]
    return found


def as_arrays(model: nn.Module, others: Mapping[str, torch.Tensor], convert: Any) -> dict[str, Any]:
    """The entries of a model as arrays, some of them replaced."""
    return {key: convert(others.get(key, tensor)) for key, tensor in entries_of(model).items()}

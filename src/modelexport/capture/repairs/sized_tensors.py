"""Functions that make as many elements as a size says, which PyTorch takes as a number: the axis would be fixed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional


def spaced(start: Any, end: Any, steps: Any, *, dtype: Any = None, **how: Any) -> Any:
    """``torch.linspace``, also of one number; in float64, and rounded once. TorchScript's divides by zero for one."""
    kept = dtype or torch.get_default_dtype()
    if not kept.is_floating_point or type(steps) is int:
        return torch.linspace(start, end, steps, dtype=dtype, **how)
    numbers = torch.arange(steps, dtype=torch.float64, device=how.get("device"))
    return (start + numbers * ((end - start) / _at_least_one(steps - 1))).to(kept)


def _at_least_one(size: Any) -> Any:
    return size.clamp(min=1) if isinstance(size, torch.Tensor) else torch.sym_max(size, 1)


def hamming(window_length: Any, periodic: bool = True, alpha: float = 0.54, beta: float = 0.46, **options: Any) -> Any:
    """``torch.hamming_window``; ONNX's has other coefficients, 25/46 and 21/46."""
    return cosines(alpha, -beta)(window_length, periodic, **options)


def cosines(*factors: float) -> Callable[..., Any]:
    """A window that is a sum of cosines, ``a + b * cos(x) + c * cos(2 * x)``."""
    return _window(lambda x: sum(factor * torch.cos(x * (2 * math.pi * k)) for k, factor in enumerate(factors)))


def _window(function: Callable[[Any], Any]) -> Callable[..., Any]:
    """A window of PyTorch from its values between 0 and 1."""

    def window(window_length: Any, periodic: bool = True, *, dtype: Any = None, **how: Any) -> Any:
        kept = dtype or torch.get_default_dtype()
        if window_length == 1:
            return torch.ones(1, dtype=kept)
        places = torch.arange(window_length, dtype=torch.float64, device=how.get("device"))
        return function(places / (window_length if periodic else window_length - 1)).to(kept)

    return window


def one_hot(tensor: Any, num_classes: Any = -1) -> Any:
    """``one_hot`` of as many classes as a size says."""
    if type(num_classes) is int:
        return functional.one_hot(tensor, num_classes)
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()


def vandermonde(x: Any, N: Any = None, increasing: bool = False) -> Any:
    """``torch.vander``."""
    exponents = torch.arange(x.shape[-1] if N is None else N, device=x.device)
    return x.unsqueeze(-1) ** (exponents if increasing else exponents.flip(0))


def kronecker(input: Any, other: Any) -> Any:
    """``torch.kron``."""
    rank = max(input.dim(), other.dim())
    first, second = (factor.reshape([1] * (rank - factor.dim()) + list(factor.shape)) for factor in (input, other))
    sizes = [a * b for a, b in zip(first.shape, second.shape, strict=True)]
    for axis in range(rank):
        first, second = first.unsqueeze(2 * axis + 1), second.unsqueeze(2 * axis)
    return (first * second).reshape(sizes)


def affine_grid(theta: Any, size: Sequence[Any], align_corners: bool | None = None) -> Any:
    """``affine_grid``."""
    axes = [
        (2 * torch.arange(n, dtype=torch.float64) - (n - 1)) / (_at_least_one(n - 1) if align_corners else n)
        for n in size[2:]
    ]
    places = torch.meshgrid(*axes, indexing="ij")
    base = torch.stack([*reversed(places), torch.ones_like(places[0])], -1).reshape(-1, len(axes) + 1)
    return (base.to(theta.dtype) @ theta.transpose(1, 2)).reshape(*theta.shape[:1], *size[2:], len(axes))


SIZED: Mapping[Any, Callable[..., Any]] = {
    torch.linspace: spaced,
    torch.hann_window: cosines(0.5, -0.5),
    torch.hamming_window: hamming,
    torch.blackman_window: cosines(0.42, -0.5, 0.08),
    torch.bartlett_window: _window(lambda x: 1 - torch.abs(2 * x - 1)),
    functional.one_hot: one_hot,
    torch.vander: vandermonde,
    torch.kron: kronecker,
    functional.affine_grid: affine_grid,
}

"""Functions that make as many elements as a size says, which PyTorch takes as a number: the axis would be fixed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from modelexport.pytorch.private_torch import tracing_state


def spaced(start: Any, end: Any, steps: Any, *, dtype: Any = None, **how: Any) -> Any:
    """``torch.linspace``, also of one number; in float64, and rounded once. TorchScript's divides by zero for one."""
    kept = dtype or torch.get_default_dtype()
    if not kept.is_floating_point or type(steps) is int:
        return torch.linspace(start, end, steps, dtype=dtype, **how)
    numbers = torch.arange(steps, dtype=torch.float64, device=how.get("device"))
    return (start + numbers * ((end - start) / _at_least_one(steps - 1))).to(kept)


def stepped(*bounds: Any, **options: Any) -> Any:
    """``torch.arange`` by fractions: PyTorch counts the elements in float64. ONNX counts them in the type that they
    have, in which 2.4 / 0.1 is more than 24.
    """
    given = {"start": 0, "step": 1, **options} | dict(
        zip(("start", "end", "step")[len(bounds) == 1 :], bounds, strict=False)
    )
    numbers = first, last, by = given["start"], given["end"], given["step"]
    kept, of_sizes = given.get("dtype") or torch.get_default_dtype(), any(isinstance(n, torch.Tensor) for n in numbers)
    is_constant = of_sizes is (
        tracing_state() is None
    )  # in a trace, sizes are tensors; elsewhere, tensors are not sizes
    by_fractions = _is_rounded(by) or any(map(_is_fraction, numbers))
    if is_constant or not by_fractions or not kept.is_floating_point or "out" in given:
        return torch.arange(*bounds, **options)
    if any(map(_is_rounded, numbers)):
        raise NotImplementedError(
            "arange by fractions and a number that is computed from sizes, which a trace rounds: "
            "write it as torch.arange(count) * step, or use the front end dynamo"
        )
    count: Any
    if of_sizes:  # in an axis, since the TorchScript exporter computes scalars in float32
        first, last, by = (torch.as_tensor(number, dtype=torch.float64).reshape(1) for number in numbers)
        count = ((last - first) / by).ceil().long().squeeze()
    else:
        count = math.ceil((last - first) / by)
    return (first + torch.arange(count, dtype=torch.float64, device=given.get("device")) * by).to(kept)


def _is_fraction(number: Any) -> bool:
    return isinstance(number, torch.SymFloat) or (isinstance(number, float) and not number.is_integer())


def _is_rounded(number: Any) -> bool:
    return isinstance(number, torch.Tensor) and number.is_floating_point()


def powers_spaced(start: Any, end: Any, steps: Any, base: float = 10.0, *, dtype: Any = None, **how: Any) -> Any:
    """``torch.logspace``."""
    if type(steps) is int:
        return torch.logspace(start, end, steps, base, dtype=dtype, **how)
    return (base ** spaced(start, end, steps, dtype=torch.float64, **how)).to(dtype or torch.get_default_dtype())


def indices_of(function: Callable[..., Any], triangle: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.triu_indices`` and ``torch.tril_indices``."""

    def indices(row: Any, col: Any, offset: int = 0, **how: Any) -> Any:
        if type(row) is int and type(col) is int:
            return function(row, col, offset, **how)
        places = triangle(torch.ones(row, col, device=how.get("device")), offset).nonzero().T
        return places.to(how.get("dtype") or torch.long)

    return indices


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


def interpolated(
    input: Any, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: Any = None, **how: Any
) -> Any:
    """``interpolate`` by quotients of sizes, one axis after the other: PyTorch's operators make numbers of them."""
    axes = input.dim() - 2
    scales = [*scale_factor] if isinstance(scale_factor, Sequence) else [scale_factor] * axes
    by_sizes = any(isinstance(scale, torch.SymFloat) for scale in scales)
    if not by_sizes or mode == "area" or any(how.values()) or not input.is_floating_point():
        return functional.interpolate(input, size, scale_factor, mode, align_corners, **how)
    if align_corners:
        sizes = [math.floor(length * scale) for length, scale in zip(input.shape[2:], scales, strict=True)]
        return functional.interpolate(input, sizes, None, mode, align_corners)
    result = input
    for axis, scale in enumerate(scales, -axes):
        size = input.shape[axis]
        result = sum(
            result.index_select(axis, place.long().clamp(0, size - 1)) * weight.reshape([-1] + [1] * (-axis - 1))
            for place, weight in _taps(mode, size, math.floor(size * scale), scale, input.dtype)
        )
    return result


def _taps(mode: str, size: Any, length: Any, scale: Any, dtype: torch.dtype) -> Sequence[tuple[Any, Any]]:
    """The places along an axis that each new element is a sum of, which may be outside, and their weights."""
    new = torch.arange(length, dtype=dtype)
    if "nearest" in mode:
        places = ((new if mode == "nearest" else new + 0.5) * (1 / scale)).floor()
    else:
        places = (new + 0.5) / scale - 0.5
    if mode not in ("nearest-exact", "bicubic"):  # these do not copy along axes that keep their size
        places = torch.where(torch.scalar_tensor(length) == torch.scalar_tensor(size), new, places.clamp(min=0))
    first = places.floor()
    part = places - first
    if "nearest" in mode:
        return [(places, torch.ones_like(places))]
    if mode != "bicubic":
        return [(first, 1 - part), (first + 1, part)]
    return [
        (
            first + step,
            ((_A + 2) * far - (_A + 3)) * far * far + 1 if step in (0, 1) else _A * (((far - 5) * far + 8) * far - 4),
        )
        for step, far in ((-1, part + 1), (0, part), (1, 1 - part), (2, 2 - part))
    ]


_A = -0.75
"""PyTorch's coefficient of cubic convolution."""


SIZED: Mapping[Any, Callable[..., Any]] = {
    torch.arange: stepped,
    torch.linspace: spaced,
    torch.hann_window: cosines(0.5, -0.5),
    torch.hamming_window: hamming,
    torch.blackman_window: cosines(0.42, -0.5, 0.08),
    torch.bartlett_window: _window(lambda x: 1 - torch.abs(2 * x - 1)),
    functional.one_hot: one_hot,
    torch.vander: vandermonde,
    torch.kron: kronecker,
    functional.affine_grid: affine_grid,
    functional.interpolate: interpolated,
    torch.logspace: powers_spaced,
    torch.triu_indices: indices_of(torch.triu_indices, torch.triu),
    torch.tril_indices: indices_of(torch.tril_indices, torch.tril),
}

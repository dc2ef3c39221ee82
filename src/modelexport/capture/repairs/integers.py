"""Operators of integers that torch.onnx lacks, or whose results it gives another type or value."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch


def with_sizes_as_tensors(operator: Callable[..., Any]) -> Callable[..., Any]:
    """An operator of a tensor and a number, whose translation takes numbers of Python and no sizes."""

    def computed(self: Any, other: Any) -> Any:
        if not any(isinstance(operand, torch.SymInt | torch.SymFloat) for operand in (self, other)):
            return NotImplemented
        like = [
            1 if isinstance(x, torch.SymInt) else 1.0 if isinstance(x, torch.SymFloat) else x for x in (self, other)
        ]
        dtype = torch.result_type(*like)
        return operator(*(x if isinstance(x, torch.Tensor) else torch.full((), x, dtype=dtype) for x in (self, other)))

    return computed


def shifted_left(self: Any, other: Any) -> Any:
    """``<<`` as a product, which wraps: torch.onnx shifts uint8 as int8, and ONNX has no shifts of signed integers."""
    number, first, second, inside = _halves(self, other)
    return torch.where(inside, number * first * second, 0).to(torch.result_type(self, other))


def shifted_right(self: Any, other: Any) -> Any:
    """``>>`` as a division, rounded down; torch.onnx computes ``div(..., rounding_mode="floor")`` in float32."""
    number, first, second, inside = _halves(self, other)
    halved = number // first // second
    return torch.where(inside, halved, torch.where(number < 0, -1, 0)).to(torch.result_type(self, other))


def _halves(self: Any, other: Any) -> tuple[Any, Any, Any, Any]:
    """The number, two powers of two whose product it is shifted by, and whether it has so many bits."""
    number, count = (
        operand.long() if isinstance(operand, torch.Tensor) else torch.full((), operand, dtype=torch.long)
        for operand in (self, other)
    )
    inside = (count >= 0) & (count < torch.iinfo(torch.result_type(self, other)).bits)
    count = torch.where(inside, count, 0)
    first = torch.div(count, 2, rounding_mode="floor")
    two = torch.full((), 2, dtype=torch.long)
    return number, two**first, two ** (count - first), inside


def taken_from(self: Any, other: Any, alpha: Any = 1) -> Any:
    """``rsub``, as in ``1.0 - mask``: torch.onnx cannot convert a number of Python and an integer to one type."""
    dtype = torch.result_type(self, other)
    return torch.sub(torch.full((), other, dtype=dtype), self.to(dtype), alpha=alpha)


def whole(self: Any) -> Any:
    """``floor``, ``ceil``, ``round`` and ``trunc`` of integers, which ONNX does not have."""
    return NotImplemented if self.is_floating_point() else self.clone()


def without_negative(self: Any) -> Any:
    """``relu`` of integers: ONNX Runtime has no ``Relu`` of int64."""
    return NotImplemented if self.is_floating_point() else self.clamp(min=0)


def between(self: Any, min: Any = None, max: Any = None) -> Any:
    """``clamp`` between numbers of two types, as an integer and one made of a size, which torch.onnx has no overload
    for.
    """
    if min is None or max is None or type(min) is type(max):
        return NotImplemented
    return torch.clamp(torch.clamp(self, min=min), max=max)


def with_sign_of(self: Any, other: Any) -> Any:
    """``copysign`` of a tensor and a number, whose scalar torch.onnx does not translate."""
    dtype = self.dtype if self.is_floating_point() else torch.get_default_dtype()
    return torch.copysign(self, torch.full((), other, dtype=dtype))


def stacked(tensors: Sequence[Any], dim: int = 0) -> Any:
    """``stack`` of several types: ``Concat`` takes one."""
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    if all(tensor.dtype is dtype for tensor in tensors):
        return NotImplemented
    return torch.stack([tensor.to(dtype) for tensor in tensors], dim)

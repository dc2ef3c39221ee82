"""Operators that round, as PyTorch's run and its file compute them in float64: what is a tie in one is one in both.

A sum that is computed in another order is off in its last bits, and half an integer would be rounded up in one run and
down in the other. The operators of quantization are written out, since PyTorch has them for float32 alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from modelexport.traces.numpy_kernels import TIES


def rounded(x: torch.Tensor) -> torch.Tensor:
    """``torch.round`` of numbers that are off in their last bits."""
    return torch.round(torch.round(x * TIES) / TIES) if x.is_floating_point() else x


def quantized(x: torch.Tensor, scale: Any, zero_point: Any, low: int, high: int, axis: int | None = None) -> Any:
    """The integers of a quantization, as ``x`` has its numbers."""
    scale, zero_point = _along(scale, x, axis), _along(zero_point, x, axis)
    return (rounded(x.double() / scale) + zero_point).clamp(low, high)


def _along(value: Any, x: torch.Tensor, axis: int | None) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.reshape(()) if axis is None else value.reshape([-1, *[1] * (x.dim() - axis % x.dim() - 1)])


def _there_and_back(x: Any, scale: Any, zero_point: Any, low: int, high: int, axis: int | None = None) -> Any:
    integers = quantized(x, scale, zero_point, low, high, axis)
    return (integers - _along(zero_point, x, axis)) * _along(scale, x, axis), torch.ones_like(x, dtype=torch.bool)


def _observed(
    x: Any, observes: Any, quantizes: Any, least: Any, most: Any, scale: Any, zero: Any, c: float, low: int, high: int,
    axis: int, per_row: bool = False, symmetric: bool = False,
) -> Any:  # fmt: skip
    if not quantizes.any():
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    return _there_and_back(x, scale, zero, low, high, axis if per_row else None)


_WRITTEN_OUT: dict[str, Callable[..., Any]] = {
    "aten::round": rounded,
    "aten::fake_quantize_per_tensor_affine_cachemask": _there_and_back,
    "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": lambda x, scale, zero, on, low, high: (
        _there_and_back(x, scale, zero, low, high)
    ),
    "aten::fake_quantize_per_channel_affine_cachemask": lambda x, scale, zero, axis, low, high: _there_and_back(
        x, scale, zero, low, high, axis
    ),
    "aten::_fused_moving_avg_obs_fq_helper": _observed,
    **dict.fromkeys(
        [f"quantized_decomposed::quantize_per_tensor{more}" for more in ("", ".tensor", ".tensor2")],
        lambda x, scale, zero, low, high, dtype: quantized(x, scale, zero, low, high).to(dtype),
    ),
    **dict.fromkeys(
        [f"quantized_decomposed::dequantize_per_tensor{more}" for more in ("", ".tensor", ".tensor2")],
        lambda x, scale, zero, low, high, dtype, out_dtype=None: (x.double() - zero) * scale,
    ),
    "quantized_decomposed::quantize_per_channel": lambda x, scale, zero, axis, low, high, dtype: quantized(
        x, scale, zero, low, high, axis
    ).to(dtype),
    "quantized_decomposed::dequantize_per_channel": lambda x, scale, zero, axis, low, high, dtype, out_dtype=None: (
        (x.double() - _along(zero, x, axis)) * _along(scale, x, axis)
    ),
}
"""Names of operators to functions of float64."""


@cache
def written_out(operator: Any) -> Callable[..., Any] | None:
    """A function that computes an operator in float64; ``None`` if PyTorch's own kernel does."""
    return _WRITTEN_OUT.get(operator.name()) if hasattr(operator, "_schema") else None

"""Operators that make integers, as PyTorch's run and its file compute them in float64: both make the same.

A sum that is computed in another order is off in its last bits, and half an integer would be rounded up in one run and
down in the other. The operators of quantization are written out, since PyTorch has them for float32 alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from modelexport.pytorch.private_torch import schema_of
from modelexport.traces.numpy_kernels import without_last_bits


def _counted(x: Any) -> Any:
    """Numbers as integers are made of them."""
    return without_last_bits(x, torch.where) if x.dtype is torch.float64 else x


def _makes_whole(operator: Any) -> dict[str, Callable[..., Any]]:
    """An operator and its variant that writes into its argument, by their names."""
    name = f"aten::{operator.__name__}"
    return {name: lambda x: operator(_counted(x)), f"{name}_": lambda x: x.copy_(operator(_counted(x)))}


def _is_of_integers(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _converted(x: Any, *, dtype: torch.dtype | None = None, **how: Any) -> Any:
    makes_integers = dtype is not None and _is_of_integers(dtype)
    return torch.ops.aten._to_copy.default(_counted(x) if makes_integers else x, dtype=dtype, **how)


def _copied(into: Any, x: Any, *how: Any) -> Any:
    return into.copy_(_counted(x) if _is_of_integers(into.dtype) else x, *how)


def _rounded_to(x: Any, *, decimals: int) -> Any:
    return torch.round(_counted(x * 10.0**decimals)) / 10.0**decimals


def _divided(x: Any, other: Any, *, rounding_mode: str | None) -> Any:
    if rounding_mode != "trunc" or x.dtype is not torch.float64:
        return torch.div(x, other, rounding_mode=rounding_mode)
    return torch.trunc(_counted(torch.div(x, other)))


def quantized(x: torch.Tensor, scale: Any, zero_point: Any, low: int, high: int, axis: int | None = None) -> Any:
    """The integers of a quantization, as ``x`` has its numbers."""
    scale, zero_point = _along(scale, x, axis), _along(zero_point, x, axis)
    return (torch.round(_counted(x.double() / scale)) + zero_point).clamp(low, high)


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
    **_makes_whole(torch.ceil),
    **_makes_whole(torch.floor),
    **_makes_whole(torch.round),
    **_makes_whole(torch.trunc),
    "aten::_to_copy": _converted,
    "aten::copy_": _copied,
    "aten::frac": lambda x: x - torch.trunc(_counted(x)),
    "aten::round.decimals": _rounded_to,
    **dict.fromkeys(("aten::div.Tensor_mode", "aten::div.Scalar_mode"), _divided),
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
    return _WRITTEN_OUT.get(operator.name()) if schema_of(operator) is not None else None

"""Fake quantization as ``QuantizeLinear`` and ``DequantizeLinear``, with ``Clip`` between where not all integers occur.

torchlib translates three ranges of integers, quantizes per tensor to the whole range of a type, and has scales of other
shapes than the operators take.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset18 as op

from modelexport.capture.repairs.translation_constants import ints, table

_TYPES = (ir.DataType.UINT8, ir.DataType.INT8)
_FLOATS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


def quantizers() -> dict[Any, Any]:
    """Operators to their translations."""
    aten = torch.ops.aten
    found = {
        aten.fake_quantize_per_tensor_affine.default: per_tensor,
        aten.fake_quantize_per_tensor_affine.tensor_qparams: per_tensor,
        aten.fake_quantize_per_channel_affine.default: per_channel,
    }
    decomposed = getattr(torch.ops, "quantized_decomposed")  # noqa: B009 - its operators are there once it is imported
    for name in ("default", "tensor", "tensor2"):
        if hasattr(decomposed, "quantize_per_tensor") and hasattr(decomposed.quantize_per_tensor, name):
            found[getattr(decomposed.quantize_per_tensor, name)] = to_integers
    return found


def per_tensor(self: Any, scale: Any, zero_point: Any, quant_min: int, quant_max: int) -> Any:
    return _there_and_back(self, scale, zero_point, quant_min, quant_max, None)


def per_channel(self: Any, scale: Any, zero_point: Any, axis: int, quant_min: int, quant_max: int) -> Any:
    return _there_and_back(self, scale, zero_point, quant_min, quant_max, axis)


def to_integers(input: Any, scale: Any, zero_point: Any, quant_min: int, quant_max: int, dtype: int) -> Any:
    """``quantized_decomposed.quantize_per_tensor``."""
    kind = ir.DataType(dtype)
    integers = op.QuantizeLinear(input, _scale(scale, None), _integers(zero_point, kind, None))
    return _clipped(integers, quant_min, quant_max, kind)


def _there_and_back(x: Any, scale: Any, zero_point: Any, low: int, high: int, axis: int | None) -> Any:
    ranges = [(kind, np.iinfo(kind.numpy())) for kind in _TYPES]
    dtype = next((kind for kind, whole in ranges if whole.min <= low and high <= whole.max), None)
    narrow = x.dtype if x.dtype in _FLOATS else None
    x = op.Cast(x, to=ir.DataType.FLOAT) if narrow is not None else x
    floating = not isinstance(zero_point, int) and zero_point.dtype not in (ir.DataType.INT32, ir.DataType.INT64)
    if dtype is None or floating:
        result = _by_arithmetic(x, scale, zero_point, low, high, axis, floating)
    else:
        scale, zero = _scale(scale, axis), _integers(zero_point, dtype, axis)
        along = {} if axis is None else {"axis": axis}
        integers = op.QuantizeLinear(x, scale, zero, **along)
        result = op.DequantizeLinear(_clipped(integers, low, high, dtype), scale, zero, **along)
    return op.Cast(result, to=narrow) if narrow is not None else result


def _clipped(integers: Any, low: int, high: int, dtype: ir.DataType) -> Any:
    whole = np.iinfo(dtype.numpy())
    if low <= whole.min and high >= whole.max:
        return integers
    return op.Clip(integers, *(table(np.array(bound, dtype.numpy())) for bound in (low, high)))


def _scale(scale: Any, axis: int | None) -> Any:
    """A scale as the operators take it: a number, or one for each place of an axis."""
    if isinstance(scale, float):
        return table(np.array(scale, np.float32))
    scale = op.Cast(scale, to=ir.DataType.FLOAT) if scale.dtype != ir.DataType.FLOAT else scale
    return _shaped(scale, axis)


def _integers(zero_point: Any, dtype: ir.DataType, axis: int | None) -> Any:
    if isinstance(zero_point, int):
        return table(np.array(zero_point, dtype.numpy()))
    return _shaped(op.Cast(zero_point, to=dtype), axis)


def _shaped(value: Any, axis: int | None) -> Any:
    rank = 0 if axis is None else 1
    if value.shape is not None and len(value.shape) == rank:
        return value
    return op.Squeeze(value) if axis is None else op.Reshape(value, ints(-1))


def _by_arithmetic(x: Any, scale: Any, zero: Any, low: int, high: int, axis: int | None, floating: bool) -> Any:
    """Quantize by arithmetic: for integers that fit no 8-bit type, and for zero points that are not integers of it."""

    def shaped(value: Any) -> Any:
        if isinstance(value, (int, float)):
            return table(np.array(value, np.float32))
        value = op.Cast(value, to=ir.DataType.FLOAT)
        return _shaped(value, None) if axis is None else op.Reshape(value, ints(-1, *[1] * (len(x.shape) - axis - 1)))

    scale, zero = shaped(scale), shaped(zero)
    divided = op.Div(x, scale)
    integers = op.Round(op.Add(divided, zero)) if floating else op.Add(op.Round(divided), zero)
    bounds = (table(np.array(bound, np.float32)) for bound in (low, high))
    return op.Mul(op.Sub(op.Clip(integers, *bounds), zero), scale)

"""Functions of numbers, one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnxscript import opset18 as op

from modelexport.capture.repairs.constants import DOUBLE, ints, table

_LANCZOS = (
    0.99999999999980993, 676.5203681218851, -1259.1392167224028, 771.32342877765313, -176.61502916214059,
    12.507343278686905, -0.13857109526572012, 9.9843695780195716e-6, 1.5056327351493116e-7,
)  # fmt: skip
"""Coefficients of the Lanczos approximation with g = 7 (Godfrey), good to 15 digits."""


def product(inp: Any, dims: Sequence[int], *, output_dtype: Any = None) -> Any:
    """``prod`` without a dimension is decomposed into this, which nothing translates."""
    made = op.ReduceProd(inp, ints(*dims), keepdims=0) if dims else op.Identity(inp)
    return made if output_dtype is None or output_dtype < 0 else op.Cast(made, to=output_dtype)


def is_negative(x: Any) -> Any:
    """``signbit``, into which ``copysign`` is decomposed; nothing translates it. Zero has a sign as well."""
    if not x.dtype.is_floating_point():
        return op.Less(x, op.CastLike(op.Constant(value_int=0), x))
    zero = op.CastLike(op.Constant(value_float=0.0), x)
    return op.Or(op.Less(x, zero), op.And(op.Equal(x, zero), op.Less(op.Reciprocal(x), zero)))


def log_sigmoid(self: Any) -> Any:
    """It is translated to the logarithm of ``Sigmoid``, of which nothing is left for numbers far below zero."""
    zero = op.CastLike(op.Constant(value_float=0.0), self)
    return op.Sub(op.Min(self, zero), op.Softplus(op.Min(self, op.Neg(self))))


def log_gamma(self: Any) -> Any:
    """Nothing translates it. In double precision, since the sum alternates; reflected below a half."""
    x = op.Cast(self, to=DOUBLE)
    half, one = _double(0.5), _double(1.0)
    low = op.Less(x, half)
    z = op.Sub(op.Where(low, op.Sub(one, x), x), one)
    total = _double(_LANCZOS[0])
    for i, coefficient in enumerate(_LANCZOS[1:], 1):
        total = op.Add(total, op.Div(_double(coefficient), op.Add(z, _double(i))))
    t = op.Add(z, _double(7.5))
    value = op.Add(
        op.Sub(op.Mul(op.Add(z, half), op.Log(t)), t), op.Add(op.Log(total), _double(0.5 * math.log(2 * math.pi)))
    )
    sine = op.Abs(op.Sin(op.Mul(_double(math.pi), op.Sub(x, op.Floor(x)))))
    reflected = op.Sub(op.Sub(_double(math.log(math.pi)), op.Log(sine)), value)
    return op.CastLike(op.Where(low, reflected, value), self)


def error_inverse(self: Any) -> Any:
    """Nothing translates ``erfinv``. Giles' polynomials for single precision, in the middle and towards the ends."""
    x = op.Cast(self, to=DOUBLE)
    one = _double(1.0)
    w = op.Neg(op.Log(op.Mul(op.Sub(one, x), op.Add(one, x))))
    middle = _polynomial(_MIDDLE, op.Sub(w, _double(2.5)))
    ends = _polynomial(_ENDS, op.Sub(op.Sqrt(w), _double(3.0)))
    return op.CastLike(op.Mul(op.Where(op.Less(w, _double(5.0)), middle, ends), x), self)


_MIDDLE = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip
_ENDS = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
    1.00167406, 2.83297682,
)  # fmt: skip


def _polynomial(coefficients: Sequence[float], x: Any) -> Any:
    total = _double(coefficients[0])
    for coefficient in coefficients[1:]:
        total = op.Add(op.Mul(total, x), _double(coefficient))
    return total


def _double(value: float) -> Any:
    return table(np.array(value, dtype=np.float64))

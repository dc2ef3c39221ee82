"""Functions of numbers, one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnxscript import opset18 as op

from modelexport.capture.repairs.parts import DOUBLE, ints, table

_LANCZOS = (
    0.99999999999980993, 676.5203681218851, -1259.1392167224028, 771.32342877765313, -176.61502916214059,
    12.507343278686905, -0.13857109526572012, 9.9843695780195716e-6, 1.5056327351493116e-7,
)  # fmt: skip
"""Coefficients of the Lanczos approximation with g = 7 (Godfrey), good to 15 digits."""


def product(inp: Any, dims: Sequence[int], *, output_dtype: Any = None) -> Any:
    """``prod`` without a dimension is decomposed into this, which nothing translates."""
    made = op.ReduceProd(inp, ints(*dims), keepdims=0) if dims else op.Identity(inp)
    return made if output_dtype is None or output_dtype < 0 else op.Cast(made, to=output_dtype)


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


def _double(value: float) -> Any:
    return table(np.array(value, dtype=np.float64))

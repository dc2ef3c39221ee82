"""Constants in translations."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import opset18 as op

DOUBLE = int(ir.DataType.DOUBLE)
INT64 = int(ir.DataType.INT64)


def ints(*numbers: int) -> Any:
    return op.Constant(value_ints=list(numbers))


def table(array: np.ndarray) -> Any:
    return op.Constant(value=ir.tensor(array))


def number(value: float, like: Any) -> Any:
    """A number in the type of a value."""
    return op.CastLike(op.Constant(value_float=float(value)), like)

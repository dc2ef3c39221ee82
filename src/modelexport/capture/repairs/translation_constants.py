"""Constants in translations."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import opset18 as op

INT64 = int(ir.DataType.INT64)


def ints(*numbers: int) -> Any:
    return op.Constant(value_ints=list(numbers))


def table(array: np.ndarray) -> Any:
    return op.Constant(value=ir.tensor(array))

"""Tensors of one number of Python. torchlib makes it a float32 first, which loses digits of a tensor in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.function_libs.torch_lib.ops.core import aten_full, aten_full_like, aten_scalar_tensor

from modelexport.capture.repairs.translation_constants import table


def scalar_tensor(s: Any, dtype: int = -1, **options: Any) -> Any:
    return aten_scalar_tensor(_number(s, dtype), dtype=ir.DataType.FLOAT if dtype in (None, -1) else dtype)


def full(size: Any, fill_value: Any, dtype: int = -1, **options: Any) -> Any:
    return aten_full(size, _number(fill_value, dtype), dtype=-1 if dtype is None else dtype)


def full_like(self: Any, fill_value: Any, dtype: int = -1, **options: Any) -> Any:
    dtype = self.dtype if dtype in (None, -1) else dtype
    return aten_full_like(self, _number(fill_value, dtype), dtype=dtype)


def new_full(self: Any, size: Any, fill_value: Any, dtype: int = -1, **options: Any) -> Any:
    dtype = self.dtype if dtype in (None, -1) else dtype
    return aten_full(size, _number(fill_value, dtype), dtype=dtype)


def _number(number: Any, dtype: int | None) -> Any:
    return table(np.array(number)) if isinstance(number, float) and dtype == ir.DataType.DOUBLE else number

"""The translations and how they are handed over: ``torch.onnx.export(custom_translation_table=...)``.

So every node that they make belongs to the FX node that it was made for. Each says what was wrong; the smallest model
of each is in ``tests/capture/test_repairs.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops.core import aten_full, aten_full_like, aten_scalar_tensor

from modelexport.capture.front_end_options import DEFAULTS, QuantizedForm
from modelexport.capture.repairs import indexing, packed_linear, pooling, recurrent
from modelexport.capture.repairs.attention import translated_attention
from modelexport.capture.repairs.quantizers import quantizers
from modelexport.capture.repairs.translation_constants import table

Table = dict[Callable[..., Any], Callable[..., Any]]


def translations(form: QuantizedForm = DEFAULTS.form) -> Table:
    """FX operator to the function that makes its ONNX nodes."""
    aten = torch.ops.aten
    return {
        aten.masked_select.default: indexing.masked_select,
        aten.unique_consecutive.default: indexing.unique_in_turn,
        torch.sym_sqrt: root,
        aten.scalar_tensor.default: scalar_tensor,
        aten.full.default: full,
        aten.new_full.default: new_full,
        aten.full_like.default: full_like,
        aten.arange.start: indexing.numbers_from,
        **pooling.max_pools(),
        aten.lstm.input: recurrent.lstm,
        aten.gru.input: recurrent.gru,
        aten.rnn_tanh.input: recurrent.rnn("Tanh"),
        aten.rnn_relu.input: recurrent.rnn("Relu"),
        **packed_linear.linear(form),
        **quantizers(),
    }


def overriding() -> Table:
    """Translations that replace those that transformers' exporter registers for the same operators."""
    aten = torch.ops.aten
    return {
        aten.index_put.default: indexing.index_put,
        aten._unsafe_index_put.default: indexing.index_put,
        aten.squeeze.dim: indexing.squeeze,
    }


def with_translations(export: Callable[..., Any], programs: list[Any], ours: Table) -> Callable[..., Any]:
    """``torch.onnx.export`` with these translations.

    The exporter of transformers gives it a table of its own. What ``torch.onnx.export`` returned is added to the list:
    that exporter keeps of it the graph alone, and not what the graph was translated from.
    """

    def with_more(*args: Any, custom_translation_table: Table | None = None, **kwargs: Any) -> Any:
        table = {**ours, **(custom_translation_table or {}), **overriding()}
        table.update(translated_attention(kwargs.get("opset_version")))
        programs.append(export(*args, custom_translation_table=table, **kwargs))
        return programs[-1]

    return with_more


def root(a: Any) -> Any:
    """``math.sqrt`` of a size."""
    return op.Sqrt(a)


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

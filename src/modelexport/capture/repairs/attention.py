"""Attention with masks that leave no key to some rows, and of other than four axes."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from onnxscript import opset18 as op
from torch.nn import functional

from modelexport.capture.patches import private, usable
from modelexport.capture.repairs.translation_constants import table
from modelexport.core.replaced_attributes import attribute_set

ATTENTION: Any = functional.scaled_dot_product_attention
"""PyTorch's own attention, which exports replace."""
_AXES = 4
_is_masked: ContextVar[bool] = ContextVar("modelexport.attention", default=False)
"""Whether the attention that is called is the one inside of :func:`with_empty_rows`."""


def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``scaled_dot_product_attention``, which torch.onnx translates for four axes and fixed numbers of heads only."""
    if kwargs.get("enable_gqa") and not (isinstance(query.shape[-3], int) and isinstance(key.shape[-3], int)):
        pairs = (part.reshape(*query.shape[:-2], *part.shape[-2:]) for part in _as_many_heads(query, key, value))
        return ATTENTION(query, *pairs, attn_mask, *args, **{**kwargs, "enable_gqa": False})
    if query.dim() < _AXES:
        added = 0 if kwargs.get("enable_gqa") else -3  # grouped heads stay heads; all others are rows of the batch
        if attn_mask is not None and attn_mask.dim() == query.dim():
            attn_mask = attn_mask.unsqueeze(added)
        parts = (part.unsqueeze(added) for part in (query, key, value))
        return ATTENTION(*parts, attn_mask, *args, **kwargs).squeeze(added)
    if query.dim() > _AXES:
        if attn_mask is not None and attn_mask.dim() >= _AXES:
            attn_mask = attn_mask.expand(*query.shape[:-3], *attn_mask.shape[-3:]).flatten(0, -4)
        attended = ATTENTION(*(x.flatten(0, -4) for x in (query, key, value)), attn_mask, *args, **kwargs)
        return attended.unflatten(0, query.shape[:-3])
    if attn_mask is None or _is_masked.get():
        return NotImplemented
    token = _is_masked.set(True)
    try:
        return with_empty_rows(query, key, value, attn_mask, *args, **kwargs)
    finally:
        _is_masked.reset(token)


def attention_of_equal_sizes(
    query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, enable_gqa: bool = False, **kwargs: Any
) -> Any:
    """Attention while a model is captured, which does not compare sizes that have to be equal in all of its kernels."""
    pairs = [(key.shape[axis], value.shape[axis]) for axis in range(-key.dim(), -1)]
    heads = (-3,) if enable_gqa else ()
    pairs += [(query.shape[axis], key.shape[axis]) for axis in (*range(-query.dim(), -2), -1) if axis not in heads]
    if attn_mask is not None:
        rows = zip([key.shape[-2], *query.shape[-2::-1]], attn_mask.shape[::-1], strict=False)
        pairs += [(size, length) for size, length in rows if _hint(length) is not None]
    for first, second in pairs if usable("check") else ():
        if not isinstance(first, torch.SymInt) or not isinstance(second, torch.SymInt):
            continue
        if _hint(second) == 1 != _hint(first):  # it is broadcast, and stays one
            int(second)
        else:
            private("check")(first == second)
    return ATTENTION(query, key, value, attn_mask, *args, enable_gqa=enable_gqa, **kwargs)


def _hint(size: Any) -> int | None:
    """The size in the example inputs; ``None`` if it depends on their values."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return size.node.hint if size.node.has_hint() else None


def _as_many_heads(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
    """Keys and values of grouped heads, each as often as queries share it."""
    heads = query.shape[-3] // key.shape[-3]
    return key.repeat_interleave(heads, -3), value.repeat_interleave(heads, -3)


def with_empty_rows(query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
    """Attention that is zero in rows whose mask is False, or -inf, for each key, as PyTorch's is.

    There the translations compute the average of the values, or NaN. Where a mask has the smallest finite number for
    each key, PyTorch computes the average, too. Layers with one mask share the condition. It is a sum: ONNX Runtime's
    symbolic inference of shapes, which its fusions ask, does not know ``ReduceMax`` with axes as an input. The result
    of ``where`` has the strides of the attention; behind ``masked_fill``, which is contiguous, reshapes stay nodes.
    """
    keys = mask if mask.dtype == torch.bool else mask > float("-inf")
    is_empty = keys.to(query.dtype).sum(-1, keepdim=True) < 1
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(is_empty, zero, ATTENTION(query, key, value, mask, *args, **kwargs))


def translated_attention(opset: int | None) -> dict[Any, Any]:
    """The translation to ONNX's ``Attention`` with masks as ONNX Runtime takes them; none for opsets without it.

    It asks for a row for each query, and takes the smallest finite number for a key that is hidden in any case.
    """
    operator = torch.ops.aten.scaled_dot_product_attention.default
    if opset is None or opset < _FIRST_OPSET or not usable("registry"):
        return {}
    translate = private("registry")(opset).get_decomps(operator)[0].onnx_function

    def attention_of_rows(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if attn_mask is not None:
            least = float(np.finfo(np.float16 if attn_mask.dtype.itemsize == 2 else attn_mask.dtype.numpy()).min) / 2
            attn_mask = op.Max(attn_mask, op.CastLike(table(np.array(least, np.float64)), attn_mask))
            rows = op.Concat(op.Shape(query, start=2, end=3), op.Shape(key, start=2, end=3), axis=0)
            attn_mask = op.Expand(attn_mask, rows)
        return translate(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    return {operator: attention_of_rows}


_FIRST_OPSET = 23


def traced_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, enable_gqa: bool = False, **kwargs: Any
) -> Any:
    """The same for the TorchScript exporter, which takes any axes, but as many heads in each argument."""
    if enable_gqa:
        key, value = _as_many_heads(query, key, value)
    compute = ATTENTION if attn_mask is None else with_empty_rows
    return compute(query, key, value, attn_mask, *args, **kwargs)


def traced_heads(*args: Any, **kwargs: Any) -> Any:
    """``multi_head_attention_forward`` with that attention."""
    with attribute_set(functional, "scaled_dot_product_attention", traced_attention):
        return functional.multi_head_attention_forward(*args, **kwargs)

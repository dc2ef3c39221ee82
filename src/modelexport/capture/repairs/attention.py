"""Attention with masks that leave no key to some rows, and of other than four axes."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import functional

from modelexport.core.replaced_attributes import attribute_set

ATTENTION: Any = functional.scaled_dot_product_attention
"""As it is outside of an export."""
_AXES = 4
_is_masked: ContextVar[bool] = ContextVar("modelexport.attention", default=False)
"""Whether the attention that is called is the one inside of :func:`_with_empty_rows`."""


def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``scaled_dot_product_attention``, which torch.onnx translates for four axes only."""
    if query.dim() < _AXES:
        if attn_mask is not None and attn_mask.dim() == query.dim():
            attn_mask = attn_mask.unsqueeze(-3)
        return ATTENTION(
            query.unsqueeze(-3), key.unsqueeze(-3), value.unsqueeze(-3), attn_mask, *args, **kwargs
        ).squeeze(-3)
    if query.dim() > _AXES:
        if attn_mask is not None and attn_mask.dim() >= _AXES:
            attn_mask = attn_mask.expand(*query.shape[:-3], *attn_mask.shape[-3:]).flatten(0, -4)
        attended = ATTENTION(*(x.flatten(0, -4) for x in (query, key, value)), attn_mask, *args, **kwargs)
        return attended.unflatten(0, query.shape[:-3])
    if attn_mask is None or _is_masked.get():
        return NotImplemented
    token = _is_masked.set(True)
    try:
        return _with_empty_rows(query, key, value, attn_mask, *args, **kwargs)
    finally:
        _is_masked.reset(token)


def _with_empty_rows(query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
    """Attention that is zero in rows whose mask is False, or -inf, for each key, as PyTorch's is.

    There the translations compute the average of the values, or NaN. Where a mask has the smallest finite number for
    each key, PyTorch computes the average, too. Layers with one mask share the condition.
    """
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
        is_empty = mask.amax(-1, keepdim=True) < 0
    else:
        is_empty = mask.amax(-1, keepdim=True) == float("-inf")
    return ATTENTION(query, key, value, mask, *args, **kwargs).masked_fill(is_empty, 0)


def traced_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, enable_gqa: bool = False, **kwargs: Any
) -> Any:
    """The same for the TorchScript exporter, which takes any axes, but as many heads in each argument."""
    if enable_gqa:
        heads = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(heads, -3), value.repeat_interleave(heads, -3)
    compute = ATTENTION if attn_mask is None else _with_empty_rows
    return compute(query, key, value, attn_mask, *args, **kwargs)


def traced_heads(*args: Any, **kwargs: Any) -> Any:
    """``multi_head_attention_forward`` with that attention."""
    with attribute_set(functional, "scaled_dot_product_attention", traced_attention):
        return functional.multi_head_attention_forward(*args, **kwargs)

"""Operators of ONNX as functions of torch: normalizations, recurrent layers, attention.

Each has the inputs, the attributes and the defaults that the standard gives its operator.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def lrn(x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Tensor:
    """Each channel divided by the squares of its neighbors."""
    squares = F.pad(x * x, [0, 0] * (x.ndim - 2) + [(size - 1) // 2, size // 2])
    return x / (bias + alpha / size * squares.unfold(1, size, 1).sum(-1)) ** beta


def instance_norm(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """Each channel of each row normalized over its places, of which there may be one."""
    rows, shape = x.flatten(2), (-1, *[1] * (x.ndim - 2))
    return F.layer_norm(rows, rows.shape[2:], eps=epsilon).view(x.shape) * scale.view(shape) + bias.view(shape)


def recurrent(
    kind: str, x: Tensor, w: Tensor, r: Tensor, b: Any, states: list[Any], *, direction: str = "forward",
    layout: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``rnn_tanh``, ``rnn_relu``, ``gru`` or ``lstm`` with the weights of ONNX: all outputs, and the last states."""
    order = {"gru": [1, 0, 2], "lstm": [0, 2, 3, 1]}.get(kind, [0])

    def gates(weight: Tensor) -> Tensor:
        return torch.cat([weight.chunk(len(order))[place] for place in order])

    x = x.transpose(0, 1) if layout else x
    x = x.flip(0) if direction == "reverse" else x
    zero = torch.zeros(len(w), x.shape[1], r.shape[-1], dtype=x.dtype, device=x.device)
    first = [zero if state is None else state.transpose(0, 1) if layout else state for state in states]
    for state in first:
        if state.shape != zero.shape:  # torch's own functions would read and write beyond its memory
            raise ValueError(f"an initial state of shape {tuple(state.shape)} for {tuple(zero.shape)}")
    weights = []
    for number in range(len(w)):
        weights += [gates(w[number]), gates(r[number])]
        weights += [] if b is None else [gates(each) for each in b[number].chunk(2)]
    given: Any = first if kind == "lstm" else first[0]
    y, *last = getattr(torch, kind)(x, given, weights, b is not None, 1, 0.0, False, len(w) == 2, False)
    y = (y.flip(0) if direction == "reverse" else y).unflatten(-1, (len(w), -1)).transpose(1, 2)
    return (y.permute(2, 0, 1, 3), *(state.transpose(0, 1) for state in last)) if layout else (y, *last)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: int, dims: int) -> Tensor:
    """Rotary embedding of the first ``dims`` numbers of each head; all if 0."""
    turned, rest = x.tensor_split([dims or x.shape[-1]], -1)
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    parts = [cos * a - sin * b, sin * a + cos * b]
    return torch.cat([torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1), rest], -1)


def rotary_embedding(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Any = None, *, interleaved: int = 0, rotary_embedding_dim: int = 0,
    num_heads: int = 0,
) -> Tensor:  # fmt: skip
    """Rotary embedding of [batch, heads, length, size] or [batch, length, heads * size]."""
    split = x.ndim == 3
    if split:
        heads = num_heads or x.shape[-1] // (2 * cos.shape[-1])
        x = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    x = rotate(x, cos.unsqueeze(1), sin.unsqueeze(1), interleaved, rotary_embedding_dim)
    return x.transpose(1, 2).flatten(2) if split else x


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Any = None, past_key: Any = None, past_value: Any = None,
    lengths: Any = None, *, is_causal: int = 0, scale: Any = None, q_num_heads: int = 0, kv_num_heads: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The result, and key and value with those of the past before them.

    Args:
        lengths: How many keys of each row are not padding.
    """
    split = query.ndim == 3
    if split:
        query = query.unflatten(-1, (q_num_heads, -1)).transpose(1, 2)
        key, value = (x.unflatten(-1, (kv_num_heads, -1)).transpose(1, 2) for x in (key, value))
    if past_key is not None:
        key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
    size, total = query.shape[2], key.shape[2]
    if mask is not None and mask.shape[-1] < total:
        mask = F.pad(mask, [0, total - mask.shape[-1]], value=False if mask.dtype is torch.bool else -math.inf)
    places = torch.arange(total, device=query.device)
    seen = torch.ones(size, total, dtype=torch.bool, device=query.device)
    last = past_key.shape[2] if past_key is not None else 0
    if lengths is not None:
        lengths = lengths.view(-1, 1, 1, 1)
        seen, last = places < lengths, lengths - size
    if is_causal:
        seen = seen & (places <= torch.arange(size, device=query.device).unsqueeze(-1) + last)
    if is_causal or lengths is not None:
        is_bool = mask is None or mask.dtype is torch.bool
        mask = seen if mask is None else mask & seen if is_bool else mask.masked_fill(~seen, -math.inf)
    grouped = query.shape[1] != key.shape[1]
    result = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=grouped)
    return result.transpose(1, 2).flatten(2) if split else result, key, value

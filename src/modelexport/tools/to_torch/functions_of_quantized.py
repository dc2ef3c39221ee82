"""Quantized operators of ONNX, and those of ONNX Runtime that fused and quantized files contain, as functions of torch.

Each has the inputs, the attributes and the defaults that its definition gives the operator.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modelexport.tools.to_torch.functions_of_layers import attention, rotate


def spread(parameter: Tensor, x: Tensor, axis: int, block: int) -> Tensor:
    """A scale or zero point, of a tensor, of channels or of blocks, in a shape that broadcasts with ``x``."""
    if parameter.numel() == 1:
        return parameter.reshape(())
    if block:
        return parameter.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    return parameter.reshape(-1, *[1] * (x.ndim - 1 - axis % x.ndim))


def dequantize_linear(x: Tensor, scale: Tensor, zero: Any = None, *, axis: int = 1, block_size: int = 0) -> Tensor:
    """``(x - zero) * scale``."""
    shift = 0 if zero is None else spread(zero, x, axis, block_size).to(scale.dtype)
    return (x.to(scale.dtype) - shift) * spread(scale, x, axis, block_size)


def quantize_linear(
    x: Tensor, scale: Tensor, zero: Any, limits: Any, dtype: torch.dtype, *, axis: int = 1, block_size: int = 0
) -> Tensor:
    """The whole numbers nearest to ``x / scale + zero``, within the limits of a type."""
    shift = 0 if zero is None else spread(zero, x, axis, block_size).to(x.dtype)
    return (torch.round(x / spread(scale, x, axis, block_size)) + shift).clamp(*limits).to(dtype)


def dynamic_quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` in 8 bits with the scale and zero point of its own range."""
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = (high - low) / 255
    zero = torch.round((-low / torch.where(scale == 0, 1.0, scale)).clamp(0, 255))
    return (torch.round(x / scale) + zero).clamp(0, 255).to(torch.uint8), scale, zero.to(torch.uint8)


def shifted(x: Tensor, zero: Any, axes: int = 0) -> Tensor:
    """Whole numbers without their zero point, of a tensor or of the rows before the last axes, in exact float64."""
    return x.double() if zero is None else x.double() - zero.double().reshape([*zero.shape, *[1] * axes])


def matmul_integer(a: Tensor, b: Tensor, a_zero: Any = None, b_zero: Any = None) -> Tensor:
    """The product of matrices of whole numbers, exact."""
    rows = int(a_zero is not None and a_zero.ndim > 0)
    return (shifted(a, a_zero, rows) @ shifted(b, b_zero)).to(torch.int32)


def dynamic_product(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The product with a matrix in 8 bits, for which ``x`` is rounded to 8 bits of its own range."""
    rounded, width, start = dynamic_quantize(x)
    return (shifted(rounded, start) @ shifted(codes, zero)).to(x.dtype) * (width * scale)


def dynamic_quantize_lstm(
    x: Tensor, w: Tensor, r: Tensor, b: Any, h: Any, c: Any, w_scale: Tensor, w_zero: Tensor, r_scale: Tensor,
    r_zero: Tensor, *, direction: str = "forward",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """An LSTM with weights in 8 bits [directions, inputs, 4 * size]; ONNX Runtime may round rows apart."""
    zero, results = x.new_zeros(len(w), x.shape[1], r.shape[1]), []
    h, c = zero if h is None else h, zero if c is None else c
    for way in range(len(w)):
        state, cell, outputs = h[way], c[way], [x] * len(x)
        gates = dynamic_product(x, w[way], w_scale[way], w_zero[way])
        gates = gates if b is None else gates + sum(b[way].chunk(2))
        places = range(len(x)) if way == 0 and direction != "reverse" else reversed(range(len(x)))
        for place in places:
            total = gates[place] + dynamic_product(state, r[way], r_scale[way], r_zero[way])
            i, o, f, new = total.chunk(4, -1)
            cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(new)
            outputs[place] = state = torch.sigmoid(o) * torch.tanh(cell)
        results.append((torch.stack(outputs), state, cell))
    y, last, cells = zip(*results, strict=True)
    return torch.stack(y, 1), torch.stack(last), torch.stack(cells)


def requantized(total: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Whole numbers times a scale, rounded to the type of a zero point."""
    limits = torch.iinfo(zero.dtype)
    return (torch.round(total * scale) + zero).clamp(limits.min, limits.max).to(zero.dtype)


def unpacked(codes: Tensor, bits: int) -> Tensor:
    """Numbers of 2, 4 or 8 bits out of the bytes of the last axis, lowest bits first."""
    shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.uint8)
    unpacked: Tensor = (codes.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return unpacked.flatten(-2)


def matmul_n_bits(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Any = None, groups: Any = None, bias: Any = None, *, K: int,
    N: int, block_size: int, bits: int = 4,
) -> Tensor:  # fmt: skip
    """A product with a weight [N, K] that is held in blocks of few bits."""
    blocks = -(-K // block_size)
    shift: Any = 2.0 ** (bits - 1)
    if zeros is not None:
        shift = zeros.reshape(N, -1) if zeros.dtype == scales.dtype else unpacked(zeros.reshape(N, -1), bits)
        shift = shift[:, :blocks].unsqueeze(-1).to(scales.dtype)
    numbers = unpacked(codes.reshape(N, blocks, -1), bits).to(scales.dtype)
    weight = ((numbers - shift) * scales.reshape(N, blocks, 1)).flatten(1)[:, :K]
    return F.linear(x, weight, bias)


def skip_layer_norm(
    x: Tensor, skip: Tensor, scale: Tensor, shift: Any = None, bias: Any = None, *, epsilon: float = 1e-12,
    is_rms: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """A sum and its normalization by mean and deviation, or by the mean square."""
    total = x + skip if bias is None else x + skip + bias
    size = total.shape[-1:]
    result = F.rms_norm(total, size, scale, epsilon) if is_rms else F.layer_norm(total, size, scale, shift, epsilon)
    return result, None, None, total


def embed_layer_norm(
    ids: Tensor, segments: Any, words: Tensor, places: Tensor, kinds: Any, scale: Tensor, shift: Tensor,
    mask: Any = None, positions: Any = None, *, epsilon: float = 1e-12,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The sum of embeddings, normalized, and the lengths of the rows."""
    total = words[ids] + (places[: ids.shape[1]] if positions is None else places[positions])
    total = total if kinds is None or segments is None else total + kinds[segments]
    lengths = torch.zeros_like(ids[:, 0]) if mask is None else mask.sum(1).to(ids.dtype)
    return F.layer_norm(total, (total.shape[-1],), scale, shift, epsilon), lengths, total


def padding_bias(mask: Any, bias: Any, lowest: float, keys: int, like: Tensor) -> Any:
    """A padding mask of ONNX Runtime's attention, and a bias, as numbers to add to the scores."""
    if mask is None:
        return bias
    if mask.ndim == 1:
        mask = torch.arange(keys, device=mask.device) < mask.unsqueeze(-1)
    mask = mask[:, None, None] if mask.ndim == 2 else mask[:, None] if mask.ndim == 3 else mask
    found = torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask == 0, lowest)
    return found if bias is None else found + bias


def packed_attention(
    x: Tensor, weight: Tensor, bias: Any = None, mask: Any = None, past: Any = None, scores: Any = None, *,
    num_heads: int, scale: Any = None, mask_filter_value: float = -10000.0, unidirectional: int = 0,
    qkv_hidden_sizes: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``Attention`` of ONNX Runtime: query, key and value out of one product."""
    product = x @ weight if bias is None else x @ weight + bias
    query, key, value = product.split(list(qkv_hidden_sizes or [product.shape[-1] // 3] * 3), -1)
    before = (None, None) if past is None else (past[0], past[1])
    result, *kept = multi_head_attention(
        query, key, value, None, mask, scores, *before, num_heads=num_heads, scale=scale,
        mask_filter_value=mask_filter_value, unidirectional=unidirectional,
    )  # fmt: skip
    return result, torch.stack(kept)


def multi_head_attention(
    query: Tensor, key: Any = None, value: Any = None, bias: Any = None, mask: Any = None, scores: Any = None,
    past_key: Any = None, past_value: Any = None, *, num_heads: int, scale: Any = None,
    mask_filter_value: float = -10000.0, unidirectional: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``MultiHeadAttention`` of ONNX Runtime."""
    if query.ndim == 5:  # [batch, length, heads, 3, size]
        query, key, value = (x.flatten(2) for x in query.unbind(3))
    elif key.ndim == 5:
        key, value = (x.flatten(2) for x in key.unbind(3))
    key, value = (x.transpose(1, 2).flatten(2) if x.ndim == 4 else x for x in (key, value))
    if bias is not None:
        parts = bias.split([query.shape[-1], key.shape[-1], value.shape[-1]])
        query, key, value = (x + part for x, part in zip((query, key, value), parts, strict=True))
    total = key.shape[1] + (0 if past_key is None else past_key.shape[2])
    added = padding_bias(mask, scores, mask_filter_value, total, query)
    return attention(
        query, key, value, added, past_key, past_value, is_causal=unidirectional, scale=scale or None,
        q_num_heads=num_heads, kv_num_heads=num_heads,
    )  # fmt: skip


def group_query_attention(
    query: Tensor, key: Any, value: Any, past_key: Any, past_value: Any, last: Tensor, total: Any, cos: Any = None,
    sin: Any = None, positions: Any = None, scores: Any = None, *, num_heads: int, kv_num_heads: int, scale: Any = None,
    do_rotary: int = 0, rotary_interleaved: int = 0, local_window_size: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``GroupQueryAttention`` of ONNX Runtime. ``last`` is the number of the last key of each row."""
    if key is None:
        query = query.unflatten(-1, (num_heads + 2 * kv_num_heads, -1)).transpose(1, 2)
        query, key, value = query.split([num_heads, kv_num_heads, kv_num_heads], 1)
    else:
        query = query.unflatten(-1, (num_heads, -1)).transpose(1, 2)
        key, value = (x.unflatten(-1, (kv_num_heads, -1)).transpose(1, 2) for x in (key, value))
    lengths, steps = last.view(-1, 1).long() + 1, torch.arange(query.shape[2], device=query.device)
    has_past = past_key is not None and past_key.shape[2] > 0
    ends = steps + (lengths - query.shape[2]).clamp(min=0) if has_past else steps.expand(len(query), -1)
    if do_rotary:
        at = (ends if positions is None else positions).clamp(max=cos.shape[0] - 1)
        turns = cos[at].unsqueeze(1), sin[at].unsqueeze(1)
        query, key = (rotate(x, *turns, rotary_interleaved, 2 * cos.shape[-1]) for x in (query, key))
    if has_past:
        most = max(past_key.shape[2], int(lengths.max()))
        key, value = (
            F.pad(past, [0, 0, 0, len(steps)]).scatter(2, ends[:, None, :, None].expand(x.shape), x)[:, :, :most]
            for past, x in ((past_key, key), (past_value, value))
        )
    places, ends = torch.arange(key.shape[2], device=query.device), ends.unsqueeze(-1)
    seen = (places <= ends) & (places < lengths.unsqueeze(-1))
    seen = seen & (places > ends - local_window_size) if local_window_size > 0 else seen
    added = torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, -math.inf).unsqueeze(1)
    added = added if scores is None else added + scores[..., : key.shape[2]]
    result = attention(query, key, value, added, scale=scale or None)[0]
    return result.transpose(1, 2).flatten(2), key, value

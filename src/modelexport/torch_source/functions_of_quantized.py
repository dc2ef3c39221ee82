"""Quantized operators of ONNX, and those of ONNX Runtime that fused and quantized files contain, as functions of torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from modelexport.torch_source.functions_of_layers import attention, convolution, rotate


def quantization_parameter(parameter: Tensor | None, x: Tensor, axis: int, block: int) -> Tensor | None:
    """A scale or zero point in a shape that broadcasts with ``x``."""
    if parameter is None or parameter.numel() == 1:
        return parameter if parameter is None else parameter.reshape(())
    if block:
        return parameter.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    return parameter.reshape(-1, *[1] * (x.ndim - 1 - axis % x.ndim))


def dequantize(x: Tensor, scale: Tensor, zero: Tensor | None, axis: int = 1, block: int = 0) -> Tensor:
    """``(x - zero) * scale``, by tensor, channel or block."""
    number = x.to(scale.dtype)
    shift = quantization_parameter(zero, x, axis, block)
    factor = quantization_parameter(scale, x, axis, block)
    assert factor is not None
    return (number if shift is None else number - shift.to(scale.dtype)) * factor


def quantize(
    x: Tensor, scale: Tensor, zero: Tensor | None, axis: int, block: int, low: int, high: int, dtype: torch.dtype
) -> Tensor:
    """The whole numbers nearest to ``x / scale + zero``, within the range of a type."""
    factor = quantization_parameter(scale, x, axis, block)
    shift = quantization_parameter(zero, x, axis, block)
    assert factor is not None
    number = torch.round(x / factor)
    return (number if shift is None else number + shift.to(x.dtype)).clamp(low, high).to(dtype)


def dynamic_quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` in 8 bits with the scale and zero point of its own range."""
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = (high - low) / 255
    scale = torch.where(scale == 0, 1.0, scale)
    zero = torch.round((-low / scale).clamp(0, 255))
    return torch.round(x / scale + zero).clamp(0, 255).to(torch.uint8), scale, zero.to(torch.uint8)


def integer_product(a: Tensor, b: Tensor, a_zero: Tensor | None, b_zero: Tensor | None) -> Tensor:
    """The product of matrices of whole numbers, exact."""
    a, b = a.double(), b.double()
    if a_zero is not None:
        a = a - (a_zero.double().unsqueeze(-1) if a_zero.ndim else a_zero.double())
    return (a @ (b if b_zero is None else b - b_zero.double())).to(torch.int32)


def integer_convolution(
    x: Tensor, w: Tensor, x_zero: Tensor | None, w_zero: Tensor | None, strides: Any, pads: Any, dilations: Any, group: int
) -> Tensor:
    """A convolution of whole numbers, exact."""
    number = x.double() if x_zero is None else x.double() - x_zero.double()
    weight = w.double()
    if w_zero is not None:
        weight = weight - w_zero.double().reshape(-1, *[1] * (w.ndim - 1))
    return convolution(number, weight, None, strides, pads, dilations, group).to(torch.int32)


def unpacked(codes: Tensor, bits: int) -> Tensor:
    """Numbers of 2, 4 or 8 bits out of the bytes of the last axis, lowest bits first."""
    if bits == 8:
        return codes
    shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.uint8)
    return ((codes.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)


def block_weight(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, width: int, height: int, bits: int, block: int
) -> Tensor:
    """The weight [height, width] that ``MatMulNBits`` holds in blocks of few bits."""
    blocks = -(-width // block)
    numbers = unpacked(codes.reshape(height, blocks, -1), bits).to(scales.dtype)
    if zeros is None:
        shift = torch.tensor(2.0 ** (bits - 1), dtype=scales.dtype, device=scales.device)
    elif zeros.dtype == scales.dtype:
        shift = zeros.reshape(height, blocks, 1)
    else:
        shift = unpacked(zeros.reshape(height, -1), bits)[:, :blocks].unsqueeze(-1).to(scales.dtype)
    return ((numbers - shift) * scales.reshape(height, blocks, 1)).flatten(1)[:, :width]


def gather_blocks(
    codes: Tensor, indices: Tensor, scales: Tensor, zeros: Tensor | None, axis: int, block: int, bits: int
) -> Tensor:
    """Slices along the first axis of a tensor that is quantized in blocks along its last."""
    if axis != 0:
        raise NotImplementedError("GatherBlockQuantized along another axis than the first")
    rows = codes[indices.long()]
    numbers = (unpacked(rows, bits) if rows.dtype is torch.uint8 else rows).to(scales.dtype)
    factors = scales[indices.long()].repeat_interleave(block, -1)[..., : numbers.shape[-1]]
    shift: Tensor | float = 2.0 ** (bits - 1) if rows.dtype is torch.uint8 else 0.0
    if zeros is not None:
        own = zeros[indices.long()]
        own = unpacked(own, bits)[..., : scales.shape[-1]] if own.dtype is torch.uint8 else own
        shift = own.to(scales.dtype).repeat_interleave(block, -1)[..., : numbers.shape[-1]]
    return (numbers - shift) * factors


def skip_norm(
    x: Tensor, skip: Tensor, scale: Tensor, shift: Tensor | None, bias: Tensor | None, epsilon: float, centered: bool
) -> tuple[Tensor, None, None, Tensor]:
    """A sum and its normalization, by mean and deviation or by the mean square."""
    total = x + skip if bias is None else x + skip + bias
    if centered:
        result = F.layer_norm(total, (total.shape[-1],), scale, shift, epsilon)
    else:
        result = F.rms_norm(total, (total.shape[-1],), scale, epsilon)
    return result, None, None, total


def embed_norm(
    ids: Tensor,
    segments: Tensor | None,
    words: Tensor,
    places: Tensor,
    kinds: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``EmbedLayerNormalization``: the sum of embeddings, normalized, and the lengths of the rows."""
    total = words[ids.long()] + (places[: ids.shape[1]] if positions is None else places[positions.long()])
    total = total if kinds is None or segments is None else total + kinds[segments.long()]
    lengths = torch.zeros_like(ids[:, 0]) if mask is None else mask.sum(1).to(ids.dtype)
    return F.layer_norm(total, (total.shape[-1],), scale, shift, epsilon), lengths, total


def key_mask(mask: Tensor | None, lowest: float, keys: int, like: Tensor) -> Tensor | None:
    """A padding mask of ONNX Runtime's attention as numbers to add to the scores."""
    if mask is None:
        return None
    if mask.ndim == 1:
        mask = torch.arange(keys, device=mask.device) < mask.unsqueeze(-1)
    mask = mask[:, None, None] if mask.ndim == 2 else mask[:, None] if mask.ndim == 3 else mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask == 0, lowest)


def packed_attention(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    past: Tensor | None,
    scores: Tensor | None,
    heads: int,
    scale: float | None,
    lowest: float,
    causal: bool,
    sizes: Any,
) -> tuple[Tensor, Tensor]:
    """``Attention`` of ONNX Runtime: query, key and value out of one product."""
    product = x @ weight if bias is None else x @ weight + bias
    query, key, value = product.split(list(sizes) if sizes else product.shape[-1] // 3, -1)
    before = (None, None) if past is None else (past[0], past[1])
    total = x.shape[1] + (0 if past is None else past.shape[3])
    added = key_mask(mask, lowest, total, x)
    added = scores if added is None else added if scores is None else added + scores
    result, key, value, _ = attention(query, key, value, added, causal, scale, 0.0, (heads, heads), before)
    return result, torch.stack([key, value])


def multi_head_attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    scores: Tensor | None,
    past_key: Tensor | None,
    past_value: Tensor | None,
    heads: int,
    scale: float | None,
    lowest: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``MultiHeadAttention`` of ONNX Runtime."""
    if query.ndim == 5:  # [batch, length, heads, 3, size]
        query, key, value = (x.flatten(2) for x in query.unbind(3))
    elif key is not None and key.ndim == 5:
        key, value = (x.flatten(2) for x in key.unbind(3))
    assert key is not None and value is not None
    if bias is not None:
        b_query, b_key, b_value = bias.split([query.shape[-1], query.shape[-1], bias.shape[0] - 2 * query.shape[-1]])
        query = query + b_query
        key, value = (key + b_key, value + b_value) if key.ndim == 3 else (key, value)
    if key.ndim == 4:
        key, value = (x.transpose(1, 2).flatten(2) for x in (key, value))
    past = (past_key, past_value)
    total = key.shape[1] + (0 if past_key is None else past_key.shape[2])
    added = key_mask(mask, lowest, total, query)
    added = scores if added is None else added if scores is None else added + scores
    result, key, value, _ = attention(query, key, value, added, causal, scale, 0.0, (heads, heads), past)
    return result, key, value


def group_query_attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    past_key: Tensor | None,
    past_value: Tensor | None,
    last: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    scores: Tensor | None,
    heads: int,
    key_heads: int,
    scale: float | None,
    softcap: float,
    rotary: bool,
    interleaved: bool,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """``GroupQueryAttention`` of ONNX Runtime. ``last`` is the number of the last key of each row."""
    if key is None or value is None:
        size = query.shape[-1] // (heads + 2 * key_heads)
        query, key, value = query.split([heads * size, key_heads * size, key_heads * size], -1)
    query = query.unflatten(-1, (heads, -1)).transpose(1, 2)
    key, value = (x.unflatten(-1, (key_heads, -1)).transpose(1, 2) for x in (key, value))
    lengths = last.flatten().long() + 1
    steps = torch.arange(query.shape[2], device=query.device)
    has_past = past_key is not None and past_key.shape[2] > 0
    begins = (lengths - query.shape[2]).clamp(min=0) if has_past else torch.zeros_like(lengths)
    if rotary:
        assert cos is not None and sin is not None
        at = begins.unsqueeze(-1) + steps if positions is None else positions
        at = at.clamp(max=cos.shape[0] - 1)
        turn = cos[at].unsqueeze(1), sin[at].unsqueeze(1)
        query, key = (rotate(x, *turn, interleaved, 2 * cos.shape[-1]) for x in (query, key))
    if past_key is not None and past_value is not None and has_past:
        room = past_key.shape[2]
        pads = [0, 0, 0, query.shape[2]]
        at = (begins.view(-1, 1, 1, 1) + steps.view(-1, 1)).expand(key.shape)
        key = F.pad(past_key, pads).scatter(2, at, key)
        value = F.pad(past_value, pads).scatter(2, at[..., :1].expand(value.shape), value)
        most = max(room, int(lengths.max()))
        key, value = key[:, :, :most], value[:, :, :most]
    places = torch.arange(key.shape[2], device=query.device)
    ends = (begins.unsqueeze(-1) + steps).view(-1, 1, steps.shape[0], 1)
    seen = (places <= ends) & (places < lengths.view(-1, 1, 1, 1))
    seen = seen & (places > ends - window) if window > 0 else seen
    added = torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, -math.inf)
    if scores is not None:
        added = added + scores[..., : key.shape[2]]
    result, _, _, _ = attention(query, key, value, added, False, scale, softcap, (heads, key_heads))
    return result.transpose(1, 2).flatten(2), key, value

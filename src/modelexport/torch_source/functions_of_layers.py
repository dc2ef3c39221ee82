"""Operators of ONNX as functions of torch: convolutions, pools, normalizations, recurrent layers, attention.

Each has the inputs, the attributes and the defaults that the standard gives its operator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


def padded(x: Tensor, window: Sequence[Any], pads: Any, auto_pad: str, value: float = 0.0) -> Tensor:
    """An image with padding around it. ``pads`` are all numbers before, then all behind; ``window`` is the sizes, the
    strides and the dilations of the kernel."""
    axes = x.ndim - 2
    pads = list(pads or [0] * 2 * axes)
    if auto_pad.startswith("SAME"):
        sizes = zip(x.shape[2:], *window, strict=True)
        totals = [max(0, (-(-size // step) - 1) * step + (k - 1) * gap + 1 - size) for size, k, step, gap in sizes]
        less, more = [total // 2 for total in totals], [total - total // 2 for total in totals]
        pads = [*less, *more] if auto_pad == "SAME_UPPER" else [*more, *less]
    around = [each for axis in reversed(range(axes)) for each in (pads[axis], pads[axis + axes])]
    return F.pad(x, around, value=value) if any(around) else x


def conv(
    x: Tensor, weight: Tensor, bias: Any = None, *, strides: Any = None, pads: Any = None, dilations: Any = None,
    group: int = 1, auto_pad: str = "NOTSET", kernel_shape: Any = None,
) -> Tensor:  # fmt: skip
    """A convolution."""
    axes = x.ndim - 2
    strides, dilations, pads = strides or [1] * axes, dilations or [1] * axes, list(pads or [0] * 2 * axes)
    convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
    if pads[:axes] == pads[axes:] and not auto_pad.startswith("SAME"):
        return convolve(x, weight, bias, strides, pads[:axes], dilations, group)
    x = padded(x, (weight.shape[2:], strides, dilations), pads, auto_pad)
    return convolve(x, weight, bias, strides, 0, dilations, group)


def conv_transpose(
    x: Tensor, weight: Tensor, bias: Any = None, *, strides: Any = None, pads: Any = None, dilations: Any = None,
    group: int = 1, auto_pad: str = "NOTSET", kernel_shape: Any = None, output_padding: Any = None,
    output_shape: Any = None,
) -> Tensor:  # fmt: skip
    """A transposed convolution."""
    axes = x.ndim - 2
    strides, dilations, pads = strides or [1] * axes, dilations or [1] * axes, list(pads or [0] * 2 * axes)
    convolve: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[axes - 1]
    whole = convolve(x, weight, None, strides, 0, 0, group, dilations)
    whole = F.pad(whole, [each for extra in reversed(output_padding or [0] * axes) for each in (0, extra)])
    if output_shape or auto_pad.startswith("SAME"):
        sizes = output_shape or [size * step for size, step in zip(x.shape[2:], strides, strict=True)]
        total = [have - want for have, want in zip(whole.shape[2:], sizes[-axes:], strict=True)]
        before = [cut // 2 if auto_pad == "SAME_UPPER" else cut - cut // 2 for cut in total]
        pads = [*before, *(cut - first for cut, first in zip(total, before, strict=True))]
    result = F.pad(whole, [-each for axis in reversed(range(axes)) for each in (pads[axis], pads[axis + axes])])
    return result if bias is None else result + bias.view(-1, *[1] * axes)


def windows(x: Tensor, how: dict[str, Any], value: float) -> Tensor:
    """The windows of a pool as last axis, with a value in the padding. ``how`` are the attributes of the pool."""
    kernel, pads, auto = how["kernel_shape"], how.get("pads"), how.get("auto_pad", "NOTSET")
    axes, sizes = len(kernel), x.shape[2:]
    strides, dilations = how.get("strides") or [1] * axes, how.get("dilations") or [1] * axes
    x = padded(x, (kernel, strides, dilations), pads, auto, value)
    for axis, (k, step, gap) in enumerate(zip(kernel, strides, dilations, strict=True)):
        room, span = x.shape[2 + axis] - (k - 1) * gap - 1, (k - 1) * gap + 1
        count = (-(-room // step) if how.get("ceil_mode") else room // step) + 1
        first = 0 if auto.startswith("SAME") or not pads else pads[axis]
        count -= bool(how.get("ceil_mode")) and (count - 1) * step >= sizes[axis] + first
        beyond = max(0, (count - 1) * step - room)
        x = F.pad(x, [0, 0] * (x.ndim - 3 - axis) + [0, beyond], value=value) if beyond else x
        x = x.unfold(2 + axis, span, step).narrow(2 + axis, 0, count)[..., ::gap]
    return x.flatten(2 + axes)


def max_pool(x: Tensor, **how: Any) -> Tensor:
    """The largest number of each window."""
    return windows(x, how, -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min).amax(-1)


def max_pool_with_places(x: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    """The largest number of each window, and where it is in ``x`` as a whole."""
    values, places = windows(x, how, -math.inf).max(-1, keepdim=True)
    numbers = torch.arange(x.numel(), device=x.device, dtype=torch.float64).view(x.shape)
    return values.squeeze(-1), windows(numbers, how, -1.0).gather(-1, places).squeeze(-1).long()


def average_pool(x: Tensor, **how: Any) -> Tensor:
    """The mean of each window."""
    inside, kernel = torch.ones_like(x[:1, :1]), how["kernel_shape"]
    counted = dict(how)
    if how.get("count_include_pad"):
        ones = [1] * len(kernel)
        window = (kernel, how.get("strides") or ones, how.get("dilations") or ones)
        inside = padded(inside, window, how.get("pads"), how.get("auto_pad", "NOTSET"), 1.0)
        counted.update(pads=None, auto_pad="NOTSET")
    total = windows(x, how, 0.0).sum(-1)
    counts = windows(inside, counted, 0.0).sum(-1)
    return total / counts[tuple(slice(size) for size in (None, None, *total.shape[2:]))]


def lp_pool(x: Tensor, *, p: int = 2, **how: Any) -> Tensor:
    """The norm of each window."""
    return (windows(x, how, 0.0).abs() ** p).sum(-1) ** (1 / p)


def lrn(x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Tensor:
    """Each channel divided by the squares of its neighbors."""
    squares = F.pad(x * x, [0, 0] * (x.ndim - 2) + [(size - 1) // 2, size - 1 - (size - 1) // 2])
    return x / (bias + alpha / size * squares.unfold(1, size, 1).sum(-1)) ** beta


def layer_norm(
    x: Tensor, scale: Tensor, bias: Any = None, *, axis: int = -1, epsilon: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalized over the axes from one on; with the mean and one over the deviation."""
    axes = tuple(range(axis % x.ndim, x.ndim))
    mean = x.mean(axes, keepdim=True)
    inverse = ((x - mean).square().mean(axes, keepdim=True) + epsilon).rsqrt()
    result = (x - mean) * inverse * scale
    return result if bias is None else result + bias, mean, inverse


def instance_norm(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """Each channel of each row normalized over its places, of which there may be one."""
    centered = x - x.flatten(2).mean(-1).view(*x.shape[:2], *[1] * (x.ndim - 2))
    deviation = (centered.flatten(2).square().mean(-1) + epsilon).sqrt().view(*x.shape[:2], *[1] * (x.ndim - 2))
    shape = (-1, *[1] * (x.ndim - 2))
    return centered / deviation * scale.view(shape) + bias.view(shape)


def rms_norm(x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5) -> Tensor:
    """Divided by the root of the mean square over the axes from one on."""
    axes = tuple(range(axis % x.ndim, x.ndim))
    return x * (x.square().mean(axes, keepdim=True) + epsilon).rsqrt() * scale


def recurrent(
    kind: str, x: Tensor, w: Tensor, r: Tensor, b: Any, lengths: Any, states: Sequence[Any], *,
    hidden_size: int = 0, direction: str = "forward", layout: int = 0, linear_before_reset: int = 0,
    activations: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``RNN``, ``GRU`` or ``LSTM`` as ONNX has them: all outputs, and the last states."""
    if layout:
        x, states = x.transpose(0, 1), [None if state is None else state.transpose(0, 1) for state in states]
    hidden, outputs, lasts = r.shape[-1], [], []
    act = torch.relu if activations and activations[0] == "Relu" else torch.tanh
    for number in range(w.shape[0]):
        backward = direction == "reverse" or number == 1
        b_w, b_r = (torch.zeros_like(w[0, :, 0]),) * 2 if b is None else b[number].chunk(2)
        zero = torch.zeros(x.shape[1], hidden, dtype=x.dtype, device=x.device)
        now = [zero if state is None else state[number] for state in states]
        steps: list[Tensor] = []
        for place in range(x.shape[0])[:: -1 if backward else 1]:
            given, before = x[place] @ w[number].T + b_w, now[0] @ r[number].T + b_r
            if kind == "RNN":
                new = [act(given + before)]
            elif kind == "GRU":
                (z_w, r_w, h_w), (z_r, r_r, h_r) = given.chunk(3, -1), before.chunk(3, -1)
                update, reset = torch.sigmoid(z_w + z_r), torch.sigmoid(r_w + r_r)
                last = slice(2 * hidden, None)
                h_r = reset * h_r if linear_before_reset else (reset * now[0]) @ r[number, last].T + b_r[last]
                new = [(1 - update) * torch.tanh(h_w + h_r) + update * now[0]]
            else:
                i, o, f, g = (given + before).chunk(4, -1)
                cell = torch.sigmoid(f) * now[1] + torch.sigmoid(i) * torch.tanh(g)
                new = [torch.sigmoid(o) * torch.tanh(cell), cell]
            if lengths is not None:
                alive = (place < lengths).unsqueeze(-1)
                steps.append(torch.where(alive, new[0], 0.0))
                now = [torch.where(alive, after, old) for after, old in zip(new, now, strict=True)]
            else:
                steps.append(new[0])
                now = new
        outputs.append(torch.stack(steps[::-1] if backward else steps))
        lasts.append(now)
    y, ends = torch.stack(outputs, 1), [torch.stack(state) for state in zip(*lasts, strict=True)]
    return (y.permute(2, 0, 1, 3), *(end.transpose(0, 1) for end in ends)) if layout else (y, *ends)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dims: int) -> Tensor:
    """Rotary embedding of the first ``dims`` numbers of each head; all if 0."""
    dims = dims or x.shape[-1]
    turned, rest = x[..., :dims], x[..., dims:]
    cos, sin = cos[..., : dims // 2], sin[..., : dims // 2]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    real, imaginary = cos * a - sin * b, sin * a + cos * b
    turned = torch.stack([real, imaginary], -1).flatten(-2) if interleaved else torch.cat([real, imaginary], -1)
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


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
    x = rotate(x, cos.unsqueeze(1), sin.unsqueeze(1), bool(interleaved), rotary_embedding_dim)
    return x.transpose(1, 2).flatten(2) if split else x


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Any = None, past_key: Any = None, past_value: Any = None,
    lengths: Any = None, *, is_causal: int = 0, scale: Any = None, softcap: float = 0.0, q_num_heads: int = 0,
    kv_num_heads: int = 0, qk_matmul_output_mode: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The result, key and value with those of the past before them, and the scores.

    Args:
        lengths: How many keys of each row are not padding.
    """
    split = query.ndim == 3
    if split:
        query = query.unflatten(-1, (q_num_heads, -1)).transpose(1, 2)
        key, value = (x.unflatten(-1, (kv_num_heads, -1)).transpose(1, 2) for x in (key, value))
    if past_key is not None:
        key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
    groups = query.shape[1] // key.shape[1]
    many = [x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value)]
    root = math.sqrt(query.shape[-1] ** -0.5 if scale is None else scale)
    kept = [(query * root) @ (many[0] * root).transpose(-1, -2)]
    size, total = kept[0].shape[-2:]
    bias = torch.zeros((), dtype=query.dtype, device=query.device)
    if mask is not None:
        mask = F.pad(mask, [0, total - mask.shape[-1]], value=False if mask.dtype is torch.bool else -math.inf)
        bias = bias.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else bias + mask
    places = torch.arange(total, device=query.device)
    ends = torch.arange(size, device=query.device).unsqueeze(-1)
    ends = ends + (past_key.shape[2] if past_key is not None else 0)
    if lengths is not None:
        bias = bias.masked_fill(places >= lengths.view(-1, 1, 1, 1), -math.inf)
        ends = ends + (lengths.view(-1, 1, 1, 1) - size)
    bias = bias.masked_fill(places > ends, -math.inf) if is_causal else bias
    kept = [softcap * torch.tanh(kept[0] / softcap) if softcap else kept[0]] * 2
    kept.append(kept[0] + bias)
    probabilities = torch.softmax(kept[2], -1)
    kept.append(
        torch.where(bias.amax(-1, keepdim=True) == -math.inf, 0.0, probabilities) if bias.ndim else probabilities
    )
    result = kept[3] @ many[1]
    return result.transpose(1, 2).flatten(2) if split else result, key, value, kept[qk_matmul_output_mode]

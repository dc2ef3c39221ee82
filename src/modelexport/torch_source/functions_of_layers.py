"""Operators of ONNX as functions of torch: convolutions, pools, normalizations, recurrent layers, attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


def padded(
    x: Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], pads: Any, value: float = 0.0
) -> Tensor:
    """An image with padding around it. ``pads`` are numbers, all before first, or ``SAME_UPPER`` or ``SAME_LOWER``."""
    axes = len(kernel)
    if isinstance(pads, str):
        totals = [
            max(0, (-(-size // step) - 1) * step + (k - 1) * gap + 1 - size)
            for size, k, step, gap in zip(x.shape[2:], kernel, strides, dilations, strict=True)
        ]
        less, more = [total // 2 for total in totals], [total - total // 2 for total in totals]
        pads = [*less, *more] if pads == "SAME_UPPER" else [*more, *less]
    around = [each for axis in reversed(range(axes)) for each in (pads[axis], pads[axis + axes])]
    return F.pad(x, around, value=value)


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, strides: Sequence[int], pads: Any, dilations: Sequence[int], group: int
) -> Tensor:
    """A convolution whose padding differs at both ends of an axis, or depends on the size."""
    x = padded(x, weight.shape[2:], strides, dilations, pads)
    convolve: Callable[..., Tensor] = (F.conv1d, F.conv2d, F.conv3d)[x.ndim - 3]
    return convolve(x, weight, bias, strides, 0, dilations, group)


def transposed_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    strides: Sequence[int],
    pads: Any,
    dilations: Sequence[int],
    group: int,
    output_padding: Sequence[int],
    output_shape: Sequence[int] | None,
) -> Tensor:
    """A transposed convolution whose cut differs at both ends of an axis, or follows from the output's size."""
    axes = x.ndim - 2
    convolve: Callable[..., Tensor] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[axes - 1]
    extra = [min(each, max(s, d) - 1) for each, s, d in zip(output_padding, strides, dilations, strict=True)]
    whole = convolve(x, weight, bias, strides, 0, extra, group, dilations)
    if output_shape is not None or isinstance(pads, str):
        sizes = output_shape or [size * step for size, step in zip(x.shape[2:], strides, strict=True)]
        total = [have - want for have, want in zip(whole.shape[2:], sizes[-axes:], strict=True)]
        before = [cut // 2 if pads == "SAME_UPPER" else cut - cut // 2 for cut in total]
        pads = [*before, *(cut - first for cut, first in zip(total, before, strict=True))]
    return F.pad(whole, [-each for axis in reversed(range(axes)) for each in (pads[axis], pads[axis + axes])])


def pool_windows(
    x: Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], pads: Any, ceil: bool, value: float
) -> Tensor:
    """The windows of a pool as last axis, with a value in the padding."""
    before = x.shape[2:]
    x = padded(x, kernel, strides, dilations, pads, value)
    axes = len(kernel)
    for axis, (k, step, gap) in enumerate(zip(kernel, strides, dilations, strict=True)):
        size, span = x.shape[2 + axis], (k - 1) * gap + 1
        count = (-(-(size - span) // step) if ceil else (size - span) // step) + 1
        first = 0 if isinstance(pads, str) else pads[axis]
        count -= ceil and (count - 1) * step >= before[axis] + first
        beyond = max(0, (count - 1) * step + span - size)
        x = F.pad(x, [0, 0] * (x.ndim - 3 - axis) + [0, beyond], value=value) if beyond else x
        x = x.unfold(2 + axis, span, step).narrow(2 + axis, 0, count)[..., ::gap]
    return x.flatten(2 + axes)


def max_pool(x: Tensor, kernel: Any, strides: Any, pads: Any, dilations: Any, ceil: bool) -> Tensor:
    """The largest number of each window, whatever the padding."""
    lowest = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    return pool_windows(x, kernel, strides, dilations, pads, ceil, lowest).amax(-1)


def max_pool_with_places(
    x: Tensor, kernel: Any, strides: Any, pads: Any, dilations: Any, ceil: bool, columns_first: bool
) -> tuple[Tensor, Tensor]:
    """The largest number of each window, and where it is in ``x`` as a whole."""
    windows = pool_windows(x, kernel, strides, dilations, pads, ceil, -math.inf)
    numbers = torch.arange(x.numel(), device=x.device, dtype=torch.float64).view(x.shape)
    if columns_first:
        order = [0, 1, *range(x.ndim - 1, 1, -1)]
        numbers = torch.arange(x.numel(), device=x.device, dtype=torch.float64)
        numbers = numbers.view([x.shape[axis] for axis in order]).permute(order)
    values, places = windows.max(-1, keepdim=True)
    there = pool_windows(numbers, kernel, strides, dilations, pads, ceil, -1.0)
    return values.squeeze(-1), there.gather(-1, places).squeeze(-1).long()


def average_pool(
    x: Tensor, kernel: Any, strides: Any, pads: Any, dilations: Any, ceil: bool, count_padding: bool
) -> Tensor:
    """The mean of each window, whatever the padding."""
    total = pool_windows(x, kernel, strides, dilations, pads, ceil, 0.0).sum(-1)
    inside = torch.ones_like(x[:1, :1])
    if count_padding:
        inside = padded(inside, kernel, strides, dilations, pads, 1.0)
        pads = [0] * 2 * len(kernel)
    return total / pool_windows(inside, kernel, strides, dilations, pads, ceil, 0.0).sum(-1)[..., : total.shape[-1]]


def lp_pool(x: Tensor, kernel: Any, strides: Any, pads: Any, dilations: Any, ceil: bool, p: int) -> Tensor:
    """The norm of each window."""
    return (pool_windows(x, kernel, strides, dilations, pads, ceil, 0.0).abs() ** p).sum(-1) ** (1 / p)


def max_unpool(x: Tensor, places: Tensor, sizes: Sequence[int]) -> Tensor:
    """The numbers of a pool at the places that they came from, zeros elsewhere."""
    flat = torch.zeros(math.prod(sizes), dtype=x.dtype, device=x.device)
    return flat.scatter(0, places.flatten(), x.flatten()).view(*sizes)


def local_response(x: Tensor, size: int, alpha: float, beta: float, bias: float) -> Tensor:
    """Each channel divided by the squares of its neighbors."""
    squares = F.pad(x * x, [0, 0] * (x.ndim - 2) + [(size - 1) // 2, size - 1 - (size - 1) // 2])
    return x / (bias + alpha / size * squares.unfold(1, size, 1).sum(-1)) ** beta


def layer_norm(x: Tensor, scale: Tensor, bias: Tensor | None, axis: int, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Normalized over the axes from one on; with the mean and one over the deviation."""
    axes = tuple(range(axis % x.ndim, x.ndim))
    mean = x.mean(axes, keepdim=True)
    inverse = ((x - mean).square().mean(axes, keepdim=True) + epsilon).rsqrt()
    result = (x - mean) * inverse * scale
    return result if bias is None else result + bias, mean, inverse


def rms_norm(x: Tensor, scale: Tensor, axis: int, epsilon: float) -> Tensor:
    """Divided by the root of the mean square over the axes from one on."""
    axes = tuple(range(axis % x.ndim, x.ndim))
    return x * (x.square().mean(axes, keepdim=True) + epsilon).rsqrt() * scale


def mean_variance_norm(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Divided by the deviation over some axes, after the mean is taken off."""
    mean = x.mean(tuple(axes), keepdim=True)
    return (x - mean) / ((x - mean).square().mean(tuple(axes), keepdim=True).sqrt() + 1e-9)


def activation(name: str, alpha: float | None = None, beta: float | None = None) -> Callable[[Tensor], Tensor]:
    """An activation of a recurrent layer by its name in ONNX."""
    a, b = alpha, beta
    return {
        "Affine": lambda x: (1.0 if a is None else a) * x + (0.0 if b is None else b),
        "Elu": lambda x: F.elu(x, 1.0 if a is None else a),
        "HardSigmoid": lambda x: ((0.2 if a is None else a) * x + (0.5 if b is None else b)).clamp(0, 1),
        "LeakyRelu": lambda x: F.leaky_relu(x, 0.01 if a is None else a),
        "Relu": torch.relu,
        "ScaledTanh": lambda x: (1.0 if a is None else a) * torch.tanh((1.0 if b is None else b) * x),
        "Sigmoid": torch.sigmoid,
        "Softplus": F.softplus,
        "Softsign": F.softsign,
        "Tanh": torch.tanh,
        "ThresholdedRelu": lambda x: torch.where(x > (1.0 if a is None else a), x, 0.0),
    }[name]


def recurrent(
    step: Callable[..., tuple[Tensor, ...]],
    x: Tensor,
    lengths: Tensor | None,
    states: Sequence[Tensor],
    backward: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Runs a cell over a sequence, up to the length of each row: all outputs, and the last states."""
    outputs: list[Tensor] = []
    order = range(x.shape[0] - 1, -1, -1) if backward else range(x.shape[0])
    for place in order:
        new = step(x[place], *states)
        if lengths is not None:
            alive = (place < lengths).unsqueeze(-1)
            outputs.append(torch.where(alive, new[0], 0.0))
            states = [torch.where(alive, now, before) for now, before in zip(new, states, strict=True)]
        else:
            outputs.append(new[0])
            states = new
    return torch.stack(outputs[::-1] if backward else outputs), list(states)


def recurrent_layer(
    kind: str,
    x: Tensor,
    weights: Sequence[Tensor | None],
    lengths: Tensor | None,
    states: Sequence[Tensor | None],
    direction: str,
    activations: Sequence[str],
    layout: int = 0,
    clip: float | None = None,
    reset_after: bool = False,
    coupled: bool = False,
    alphas: Sequence[float] = (),
    betas: Sequence[float] = (),
) -> tuple[Tensor, ...]:
    """``RNN``, ``GRU`` or ``LSTM`` as ONNX has them.

    Args:
        weights: For the input, the state, the bias and the peepholes, each with the directions as first axis.
        states: The first states of each direction, or ``None``.
        reset_after: ``linear_before_reset`` of ``GRU``.
        coupled: ``input_forget`` of ``LSTM``.
    """
    if layout:
        x, states = x.transpose(0, 1), [None if state is None else state.transpose(0, 1) for state in states]
    w_all, r_all, b_all, p_all = weights
    assert w_all is not None and r_all is not None
    hidden = r_all.shape[-1]
    each = len(activations) // w_all.shape[0]
    outputs, lasts = [], []
    for number in range(w_all.shape[0]):
        w, r = w_all[number], r_all[number]
        bias = torch.zeros(2 * w.shape[0], dtype=x.dtype, device=x.device) if b_all is None else b_all[number]
        b_w, b_r = bias.chunk(2)
        peep = [0.0] * 3 if p_all is None else p_all[number].chunk(3)
        numbers = range(number * each, number * each + each)
        acts = [
            activation(
                activations[i], alphas[i] if i < len(alphas) else None, betas[i] if i < len(betas) else None
            )
            for i in numbers
        ]

        def cut(gate: Tensor) -> Tensor:
            return gate if clip is None else gate.clamp(-clip, clip)

        def rnn(now: Tensor, h: Tensor) -> tuple[Tensor, ...]:
            return (acts[0](cut(now @ w.T + b_w + h @ r.T + b_r)),)  # noqa: B023

        def gru(now: Tensor, h: Tensor) -> tuple[Tensor, ...]:
            z_w, r_w, h_w = (now @ w.T + b_w).chunk(3, -1)  # noqa: B023
            z_r, r_r, _ = (h @ r.T + b_r).chunk(3, -1)  # noqa: B023
            z, reset = acts[0](cut(z_w + z_r)), acts[0](cut(r_w + r_r))  # noqa: B023
            r_h, b_h = r[2 * hidden :], b_r[2 * hidden :]  # noqa: B023
            inner = reset * (h @ r_h.T + b_h) if reset_after else (reset * h) @ r_h.T + b_h
            return ((1 - z) * acts[1](cut(h_w + inner)) + z * h,)  # noqa: B023

        def lstm(now: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
            i, o, f, g = (now @ w.T + b_w + h @ r.T + b_r).chunk(4, -1)  # noqa: B023
            i = acts[0](cut(i + peep[0] * c))  # noqa: B023
            f = 1 - i if coupled else acts[0](cut(f + peep[2] * c))  # noqa: B023
            c = f * c + i * acts[1](cut(g))  # noqa: B023
            return acts[0](cut(o + peep[1] * c)) * acts[2](c), c  # noqa: B023

        zero = torch.zeros(x.shape[1], hidden, dtype=x.dtype, device=x.device)
        first = [zero if state is None else state[number] for state in states]
        backward = direction == "reverse" or number == 1
        result, last = recurrent({"RNN": rnn, "GRU": gru, "LSTM": lstm}[kind], x, lengths, first, backward)
        outputs.append(result)
        lasts.append(last)
    y, ends = torch.stack(outputs, 1), [torch.stack(state) for state in zip(*lasts, strict=True)]
    if layout:
        y, ends = y.permute(2, 0, 1, 3), [end.transpose(0, 1) for end in ends]
    return (y, *ends)


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
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, dims: int, heads: int
) -> Tensor:
    """Rotary embedding of [batch, heads, length, size] or [batch, length, heads * size]."""
    split = x.ndim == 3
    if split:
        heads = heads or x.shape[-1] // (2 * cos.shape[-1])
        x = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    x = rotate(x, cos.unsqueeze(1), sin.unsqueeze(1), interleaved, dims)
    return x.transpose(1, 2).flatten(2) if split else x


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    softcap: float,
    heads: Sequence[int],
    past: Sequence[Tensor | None] = (None, None),
    lengths: Tensor | None = None,
    scores_after: int = 0,
    window: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``Attention`` of ONNX: the result, key and value with those of the past before them, and the scores.

    Args:
        heads: Of the query, and of key and value; for tensors of three axes.
        lengths: How many keys of each row are not padding.
        scores_after: ``qk_matmul_output_mode``.
        window: How many keys each query sees, itself included, if not all.
    """
    split = query.ndim == 3
    if split:
        query = query.unflatten(-1, (heads[0], -1)).transpose(1, 2)
        key, value = (x.unflatten(-1, (heads[1], -1)).transpose(1, 2) for x in (key, value))
    if past[0] is not None and past[1] is not None:
        key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
    groups = query.shape[1] // key.shape[1]
    many_keys, many_values = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * math.sqrt(scale)) @ (many_keys * math.sqrt(scale)).transpose(-1, -2)
    kept = [scores]
    size, total = scores.shape[-2:]
    bias = torch.zeros((), dtype=scores.dtype, device=scores.device)
    if mask is not None:
        mask = F.pad(mask, [0, total - mask.shape[-1]], value=False if mask.dtype is torch.bool else -math.inf)
        bias = bias.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else bias + mask
    places = torch.arange(total, device=query.device)
    offset = past[0].shape[2] if past[0] is not None else 0
    ends = torch.arange(size, device=query.device).unsqueeze(-1) + offset
    if lengths is not None:
        ends = ends - offset + (lengths.view(-1, 1, 1, 1) - size if causal else 0)
        bias = bias.masked_fill(places >= lengths.view(-1, 1, 1, 1), -math.inf)
    if causal:
        bias = bias.masked_fill(places > ends, -math.inf)
    if window > 0:
        bias = bias.masked_fill(places <= ends - window, -math.inf)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    kept.append(scores)
    scores = scores + bias
    kept.insert(1, scores)
    probabilities = torch.softmax(scores, -1)
    kept.append(probabilities)
    result = probabilities.nan_to_num() @ many_values
    return result.transpose(1, 2).flatten(2) if split else result, key, value, kept[scores_after]

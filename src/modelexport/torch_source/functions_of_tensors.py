"""Operators of ONNX as functions of torch: indexing, shapes, and arithmetic that is not one call of torch.

Generated models contain the source of the functions that they call, so each uses only torch and other functions of
these files (``functions_*.py``), and takes attributes as Python numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


def divide_integers(a: Tensor, b: Any) -> Tensor:
    """A quotient of whole numbers, rounded towards zero."""
    return torch.div(a, b, rounding_mode="trunc")


def expand(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Broadcast to sizes; a size of 1 leaves the axis as it is."""
    return x.broadcast_to(torch.broadcast_shapes(x.shape, tuple(sizes)))


def reshape(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Reshape; a size of 0 is that of ``x`` on this axis."""
    return x.reshape([x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)])


def slice_axes(x: Tensor, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int], steps: Sequence[int]) -> Tensor:
    """A slice of some axes; a step may be negative."""
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        first, last, stride = slice(start, end, step).indices(x.shape[axis])
        if step > 0:
            x = x[(slice(None),) * (axis % x.ndim) + (slice(first, last, stride),)]
        else:
            places = torch.arange(first, last, stride, device=x.device)
            x = x.index_select(axis, places)
    return x


def gather(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """The slices of ``x`` along an axis that indices name; negative ones count from the end."""
    return x[(slice(None),) * (axis % x.ndim) + (indices.long(),)]


def gather_elements(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """The elements of ``x`` along an axis; negative indices count from the end."""
    return x.gather(axis, torch.where(indices < 0, indices + x.shape[axis], indices).long())


def scatter_elements(x: Tensor, indices: Tensor, updates: Tensor, axis: int, reduction: str) -> Tensor:
    """``x`` with elements along an axis replaced, or combined with updates."""
    indices = torch.where(indices < 0, indices + x.shape[axis], indices).long()
    if reduction == "none":
        return x.scatter(axis, indices, updates)
    names = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    return x.scatter_reduce(axis, indices, updates, names[reduction])


def gather_nd(x: Tensor, indices: Tensor, batch_dims: int) -> Tensor:
    """The slices of ``x`` that the rows of indices name."""
    sizes = indices.shape[:batch_dims]
    batch = [
        torch.arange(size, device=x.device).view(-1, *[1] * (indices.ndim - 2 - axis)) for axis, size in enumerate(sizes)
    ]
    return x[(*batch, *indices.long().unbind(-1))]


def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, reduction: str) -> Tensor:
    """``x`` with the slices that the rows of indices name replaced, or combined with updates."""
    places = tuple(indices.long().unbind(-1))
    if reduction in ("none", "add"):
        return x.index_put(places, updates, accumulate=reduction == "add")
    width = math.prod(x.shape[len(places) :])
    rows = torch.zeros(indices.shape[:-1], dtype=torch.long, device=x.device)
    for place, size in zip(places, x.shape, strict=False):
        rows = rows * size + torch.where(place < 0, place + size, place)
    names = {"mul": "prod", "max": "amax", "min": "amin"}
    flat = x.reshape(-1, width)
    rows = rows.reshape(-1, 1).expand(-1, width)
    return flat.scatter_reduce(0, rows, updates.reshape(-1, width), names[reduction]).reshape(x.shape)


def pad(x: Tensor, pads: Sequence[int], mode: str, value: Any, axes: Sequence[int] | None = None) -> Tensor:
    """Padding; negative numbers cut."""
    axes = [axis % x.ndim for axis in axes] if axes is not None else list(range(x.ndim))
    before = dict(zip(axes, pads[: len(axes)], strict=True))
    after = dict(zip(axes, pads[len(axes) :], strict=True))
    if mode == "constant":
        around = [each for axis in reversed(range(x.ndim)) for each in (before.get(axis, 0), after.get(axis, 0))]
        if x.dtype is torch.bool:
            return F.pad(x.to(torch.uint8), around, value=int(value)).bool()
        return F.pad(x, around, value=value)
    for axis in axes:
        size = x.shape[axis]
        places = torch.arange(-before[axis], size + after[axis], device=x.device)
        if mode == "edge":
            places = places.clamp(0, size - 1)
        elif mode == "wrap" or size == 1:
            places = places % size
        else:
            places = places % (2 * size - 2)
            places = torch.where(places < size, places, 2 * size - 2 - places)
        x = x.index_select(axis, places)
    return x


def cumulative_sum(x: Tensor, axis: int, exclusive: bool, reverse: bool) -> Tensor:
    """Sums along an axis of all elements up to each; without itself if exclusive, from the end if reversed."""
    x = x.flip(axis) if reverse else x
    result = x.cumsum(axis, dtype=x.dtype)
    result = result - x if exclusive else result
    return result.flip(axis) if reverse else result


def arg_extreme(x: Tensor, axis: int, keepdim: bool, last: bool, largest: bool) -> Tensor:
    """The place of the largest or smallest element along an axis: of equal ones the first, or the last."""
    best = x.amax(axis, keepdim=True) if largest else x.amin(axis, keepdim=True)
    places = torch.arange(x.shape[axis], device=x.device).view(-1, *[1] * (x.ndim - 1 - axis % x.ndim))
    if last:
        return torch.where(x == best, places, -1).amax(axis, keepdim=keepdim)
    return torch.where(x == best, places, x.shape[axis]).amin(axis, keepdim=keepdim)


def one_hot(indices: Tensor, depth: Any, values: Tensor, axis: int) -> Tensor:
    """``values[1]`` at each index and ``values[0]`` elsewhere, on a new axis."""
    depth = int(depth)
    axis = axis % (indices.ndim + 1)
    places = torch.arange(depth, device=indices.device).view(-1, *[1] * (indices.ndim - axis))
    indices = torch.where(indices < 0, indices + depth, indices)
    return torch.where(indices.unsqueeze(axis) == places, values[1], values[0])


def unique(x: Tensor, axis: int | None, is_sorted: bool) -> tuple[Tensor, ...]:
    """Distinct elements, where each is first, which of them each element is, and how often each occurs."""
    x = x.flatten() if axis is None else x
    axis = 0 if axis is None else axis
    values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True, dim=axis)
    places = torch.arange(inverse.numel(), device=x.device)
    first = torch.full_like(counts, inverse.numel()).scatter_reduce(0, inverse, places, "amin")
    if not is_sorted:
        order = first.argsort()
        values, first, counts = values.index_select(axis, order), first[order], counts[order]
        inverse = order.argsort()[inverse]
    return values, first, inverse, counts


def top_k(x: Tensor, k: Any, axis: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The largest or smallest elements along an axis, in order, and where they are."""
    values, places = torch.sort(x, dim=axis, descending=largest, stable=True)
    return values.narrow(axis, 0, int(k)), places.narrow(axis, 0, int(k))


def one_axis_softmax(x: Tensor, axis: int, log: bool) -> Tensor:
    """Softmax as opsets before 13 have it: over all axes from one on."""
    flat = x.flatten(axis % x.ndim)
    return (F.log_softmax(flat, -1) if log else F.softmax(flat, -1)).reshape(x.shape)


def hardmax(x: Tensor, axis: int) -> Tensor:
    """1 at the first largest element along an axis, 0 elsewhere."""
    places = arg_extreme(x, axis, True, False, True)
    return torch.zeros_like(x).scatter(axis, places, 1.0)


def reverse_sequence(x: Tensor, lengths: Tensor, batch_axis: int, time_axis: int) -> Tensor:
    """Each sequence of a batch reversed up to its length."""
    moved = x.movedim((batch_axis, time_axis), (0, 1))
    places = torch.arange(moved.shape[1], device=x.device).unsqueeze(0)
    lengths = lengths.unsqueeze(1)
    places = torch.where(places < lengths, lengths - 1 - places, places)
    places = places.view(*places.shape, *[1] * (moved.ndim - 2)).expand(moved.shape)
    return moved.gather(1, places).movedim((0, 1), (batch_axis, time_axis))


def depth_to_space(x: Tensor, size: int, mode: str) -> Tensor:
    """Channels moved into blocks of the image."""
    n, c, h, w = x.shape
    if mode == "DCR":
        return x.reshape(n, size, size, c // size**2, h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, -1, h * size, w * size)
    return x.reshape(n, c // size**2, size, size, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, -1, h * size, w * size)


def space_to_depth(x: Tensor, size: int) -> Tensor:
    """Blocks of the image moved into channels."""
    n, c, h, w = x.shape
    x = x.reshape(n, c, h // size, size, w // size, size)
    return x.permute(0, 3, 5, 1, 2, 4).reshape(n, c * size**2, h // size, w // size)


def center_crop_pad(x: Tensor, sizes: Sequence[int], axes: Sequence[int] | None) -> Tensor:
    """Some axes cut or padded with zeros to sizes, equally on both sides."""
    for size, axis in zip(sizes, axes if axes is not None else range(x.ndim), strict=True):
        room = int(size) - x.shape[axis]
        if room < 0:
            x = x.narrow(axis, -room // 2, int(size))
        elif room:
            x = pad(x, [room // 2, room - room // 2], "constant", 0, [axis])
    return x


def split(x: Tensor, parts: int, axis: int) -> tuple[Tensor, ...]:
    """Equal parts along an axis; the last may be smaller."""
    return x.split(-(-x.shape[axis] // parts), axis)


def resize(
    x: Tensor, sizes: Sequence[int], scales: Sequence[float], axes: Sequence[int], mode: str, places: str, **how: Any
) -> Tensor:
    """Interpolation along axes, one after the other.

    Args:
        sizes: The new size of each of the axes.
        scales: What the coordinates on each are divided by.
        places: The attribute ``coordinate_transformation_mode``.
        how: ``nearest_mode``, ``cubic_coeff_a``, ``exclude_outside``, ``antialias``, ``extrapolation_value`` and ``roi``.
    """
    outside: Any = None
    roi = how.get("roi") or [0.0] * len(axes) + [1.0] * len(axes)
    for number, (size, scale, axis) in enumerate(zip(sizes, scales, axes, strict=True)):
        length = x.shape[axis]
        if size == length and scale == 1 and places != "tf_crop_and_resize":
            continue
        at = torch.arange(size, dtype=torch.float64, device=x.device)
        if places == "align_corners":
            at = at * (length - 1) / (size - 1) if size > 1 else at * 0
        elif places == "asymmetric":
            at = at / scale
        elif places == "tf_crop_and_resize":
            start, end = roi[number], roi[number + len(axes)]
            step = (end - start) * (length - 1) / (size - 1) if size > 1 else 0.0
            at = start * (length - 1) + at * step if size > 1 else at + 0.5 * (start + end) * (length - 1)
            beyond = ((at < 0) | (at > length - 1)).view(-1, *[1] * (x.ndim - 1 - axis % x.ndim))
            outside = beyond if outside is None else outside | beyond
        elif places == "half_pixel_symmetric":
            shift = length / 2 * (1 - size / (scale * length))
            at = shift + (at + 0.5) / scale - 0.5
        else:
            at = (at + 0.5) / scale - 0.5 if places != "pytorch_half_pixel" or size > 1 else at * 0
        if mode == "nearest":
            rounded = {
                "floor": at.floor(),
                "ceil": at.ceil(),
                "round_prefer_ceil": (at + 0.5).floor(),
                "round_prefer_floor": (at - 0.5).ceil(),
            }[how.get("nearest_mode", "round_prefer_floor")]
            x = x.index_select(axis, rounded.clamp(0, length - 1).long())
            continue
        a = how.get("cubic_coeff_a", -0.75)
        spread = max(1.0, 1 / scale) if how.get("antialias") else 1.0
        reach = math.ceil((1 if mode == "linear" else 2) * spread)
        near = at.floor().unsqueeze(1) + torch.arange(1 - reach, reach + 1, device=x.device)
        apart = (near - at.unsqueeze(1)).abs() / spread
        if mode == "linear":
            weights = (1 - apart).clamp(min=0)
        else:
            inner = ((a + 2) * apart - (a + 3)) * apart * apart + 1
            outer = ((a * apart - 5 * a) * apart + 8 * a) * apart - 4 * a
            weights = torch.where(apart <= 1, inner, torch.where(apart < 2, outer, 0.0))
        if how.get("exclude_outside"):
            weights = torch.where((near < 0) | (near >= length), 0.0, weights)
        if how.get("exclude_outside") or how.get("antialias"):
            weights = weights / weights.sum(1, keepdim=True)
        kernel = torch.zeros(size, length, dtype=torch.float64, device=x.device)
        kernel = kernel.scatter_add(1, near.clamp(0, length - 1).long(), weights)
        x = (x.movedim(axis, -1) @ kernel.T.to(x.dtype)).movedim(-1, axis)
    return x if outside is None else torch.where(outside, how.get("extrapolation_value", 0.0), x)


def scatter_cache(x: Tensor, update: Tensor, places: Tensor | None, axis: int, mode: str) -> Tensor:
    """A cache with an update written along an axis, for each row of the batch from a place on."""
    steps = torch.arange(update.shape[axis], device=x.device)
    begin = torch.zeros(x.shape[0], 1, dtype=torch.long, device=x.device) if places is None else places.unsqueeze(1)
    at = begin + steps
    at = at % x.shape[axis] if mode == "circular" else at
    axis = axis % x.ndim
    at = at.view(x.shape[0], *[1] * (axis - 1), -1, *[1] * (x.ndim - 1 - axis))
    return x.scatter(axis, at.expand(update.shape), update)


def discrete_fourier(x: Tensor, length: int | None, axis: int, inverse: bool, one_sided: bool) -> Tensor:
    """The Fourier transform along an axis; the last axis has one number or the real and the imaginary part."""
    axis = axis - 1 if axis < 0 else axis
    axis = axis + x.ndim + 1 if axis < 0 else axis
    if one_sided and inverse:
        signal = torch.fft.irfft(torch.view_as_complex(x.contiguous()), n=length, dim=axis)
        return signal.unsqueeze(-1)
    if x.shape[-1] == 2:
        signal = torch.view_as_complex(x.contiguous())
    else:
        signal = x[..., 0]
        if one_sided:
            return torch.view_as_real(torch.fft.rfft(signal, n=length, dim=axis))
        signal = torch.complex(signal, torch.zeros_like(signal))
    transform = torch.fft.ifft if inverse else torch.fft.fft
    result = torch.view_as_real(transform(signal, n=length, dim=axis))
    return result[(slice(None),) * axis + (slice(result.shape[axis] // 2 + 1),)] if one_sided else result


def short_time_fourier(signal: Tensor, step: int, window: Tensor | None, length: int | None, one_sided: bool) -> Tensor:
    """Fourier transforms of overlapping frames of a signal, along its second axis."""
    length = int(window.shape[0] if length is None and window is not None else length or 0)
    frames = signal.unfold(1, length, int(step)).transpose(-1, -2)
    frames = frames if window is None else frames * window.view(-1, 1)
    return discrete_fourier(frames, None, 2, False, one_sided)


def non_max_suppression(
    boxes: Tensor, scores: Tensor, most: int, overlap: float, least: float | None, center: bool
) -> Tensor:
    """The boxes with the best scores of each class that do not overlap better ones: rows of batch, class and box."""
    if center:
        middle, size = boxes[..., :2], boxes[..., 2:] / 2
        boxes = torch.cat([middle - size, middle + size], -1)
    low = torch.minimum(boxes[..., :2], boxes[..., 2:])
    high = torch.maximum(boxes[..., :2], boxes[..., 2:])
    areas = (high - low).prod(-1)
    rows: list[list[int]] = []
    for batch in range(scores.shape[0]):
        for kind in range(scores.shape[1]):
            kept: list[int] = []
            for box in scores[batch, kind].argsort(descending=True, stable=True).tolist():
                if len(kept) >= most or (least is not None and scores[batch, kind, box] <= least):
                    break
                common = torch.minimum(high[batch, box], high[batch, kept]) - torch.maximum(
                    low[batch, box], low[batch, kept]
                )
                shared = common.clamp(min=0).prod(-1)
                if not (shared / (areas[batch, box] + areas[batch, kept] - shared) > overlap).any():
                    kept.append(box)
            rows += [[batch, kind, box] for box in kept]
    return torch.tensor(rows, dtype=torch.long, device=boxes.device).reshape(-1, 3)

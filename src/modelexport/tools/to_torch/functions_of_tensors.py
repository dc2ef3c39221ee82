"""Operators of ONNX as functions of torch: indexing, shapes, and arithmetic that is not one call of torch.

Each has the inputs, the attributes and the defaults that the standard gives its operator.

Generated models contain the source of the functions that they call, so each uses only torch and other functions of
these files (``functions_*.py``), and takes attributes as Python numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def expand(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Broadcast to sizes; a size of 1 leaves the axis as it is."""
    return x.broadcast_to(torch.broadcast_shapes(x.shape, tuple(sizes)))


def reshape(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Reshape; a size of 0 is that of ``x`` on this axis."""
    return x.reshape([x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)])


def slice_axes(
    x: Tensor, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int], steps: Sequence[int]
) -> Tensor:
    """A slice of some axes; a step may be negative."""
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=False):
        if step > 0:
            x = x[(slice(None),) * (axis % x.ndim) + (slice(start, end, step),)]
        else:
            first, last, _ = slice(start, end, step).indices(x.shape[axis])
            places = torch.arange(first, min(first, last), step, device=x.device)
            x = x.index_select(axis, places)
    return x


def gather_elements(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    """The elements of ``x`` along an axis; negative indices count from the end."""
    return x.gather(axis, torch.where(indices < 0, indices + x.shape[axis], indices).long())


def scatter_elements(x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none") -> Tensor:
    """``x`` with elements along an axis replaced, or combined with updates."""
    indices = torch.where(indices < 0, indices + x.shape[axis], indices).long()
    if reduction == "none":
        return x.scatter(axis, indices, updates)
    names = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    return x.scatter_reduce(axis, indices, updates, names[reduction])


def gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    """The slices of ``x`` that the rows of indices name."""
    shape = (-1, *[1] * (indices.ndim - 2))
    batch = [torch.arange(indices.shape[axis], device=x.device).view(shape[: len(shape) - axis])
             for axis in range(batch_dims)]  # fmt: skip
    return x[(*batch, *indices.long().unbind(-1))]


def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    """``x`` with the slices that the rows of indices name replaced, or combined with updates."""
    places = tuple(indices.long().unbind(-1))
    if reduction in ("none", "add"):
        return x.index_put(places, updates, accumulate=reduction == "add")
    width = math.prod(x.shape[len(places) :])
    numbers = torch.arange(x.numel() // width, device=x.device).view(x.shape[: len(places)])
    rows = numbers[places].reshape(-1, 1).expand(-1, width)
    names = {"mul": "prod", "max": "amax", "min": "amin"}
    flat = x.reshape(-1, width).scatter_reduce(0, rows, updates.reshape(-1, width), names[reduction])
    return flat.reshape(x.shape)


def pad(x: Tensor, pads: Any, value: Any = None, axes: Any = None, *, mode: str = "constant") -> Tensor:
    """Padding; negative numbers cut."""
    axes = [axis % x.ndim for axis in axes] if axes is not None else list(range(x.ndim))
    before, after = dict(zip(axes, pads, strict=False)), dict(zip(axes, pads[len(axes) :], strict=True))
    if mode == "constant":
        around = [each for axis in reversed(range(x.ndim)) for each in (before.get(axis, 0), after.get(axis, 0))]
        result = F.pad(x.to(torch.uint8) if x.dtype is torch.bool else x, around, value=value or 0)
        return result.to(x.dtype)
    for axis in axes:
        size = x.shape[axis]
        places = torch.arange(-before[axis], size + after[axis], device=x.device)
        if mode == "edge":
            places = places.clamp(0, size - 1)
        elif mode == "wrap" or size == 1:
            places = places % size
        else:
            places = size - 1 - (size - 1 - places % (2 * size - 2)).abs()
        x = x.index_select(axis, places)
    return x


def pad_same(
    x: Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], *, lower: bool = False,
    value: float = 0.0,
) -> Tensor:  # fmt: skip
    """Padding with which a window has as many places as strides fit into the image."""
    around: list[int] = []
    for size, width, step, gap in zip(x.shape[2:], kernel, strides, dilations, strict=True):
        total = max(0, (-(-size // step) - 1) * step + (width - 1) * gap + 1 - size)
        less, more = total // 2, total - total // 2
        around = [*((more, less) if lower else (less, more)), *around]
    return F.pad(x, around, value=value)


def cumulative_sum(x: Tensor, axis: int, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """Sums along an axis of all elements up to each; without itself if exclusive, from the end if reversed."""
    x = x.flip(axis) if reverse else x
    result = x.cumsum(axis, dtype=x.dtype)
    result = result - x if exclusive else result
    return result.flip(axis) if reverse else result


def normalize_mean_variance(x: Tensor, *, axes: Sequence[int] = (0, 2, 3)) -> Tensor:
    """``x`` with mean 0 and variance 1 over axes."""
    dims = tuple(axes)
    centered = x - x.mean(dims, keepdim=True)
    return centered / (centered.square().mean(dims, keepdim=True).sqrt() + 1e-9)


def reverse_sequence(x: Tensor, lengths: Tensor, *, batch_axis: int = 1, time_axis: int = 0) -> Tensor:
    """``x`` with the first elements of each sequence in the opposite order, as many as its length."""
    x = x.movedim((batch_axis, time_axis), (0, 1))
    places = torch.arange(x.shape[1], device=x.device)
    places = torch.where(places < lengths[:, None], lengths[:, None] - 1 - places, places)
    return x[torch.arange(x.shape[0], device=x.device)[:, None], places].movedim((0, 1), (batch_axis, time_axis))


def one_hot(indices: Tensor, depth: Any, values: Tensor, *, axis: int = -1) -> Tensor:
    """``values[1]`` at each index and ``values[0]`` elsewhere, on a new axis."""
    axis = axis % (indices.ndim + 1)
    places = torch.arange(int(depth), device=indices.device).view(-1, *[1] * (indices.ndim - axis))
    indices = torch.where(indices < 0, indices + int(depth), indices)
    return torch.where(indices.unsqueeze(axis) == places, values[1], values[0])


def unique(x: Tensor, *, axis: Any = None, sorted: int = 1) -> tuple[Tensor, ...]:
    """Distinct elements, where each is first, which of them each element is, and how often each occurs."""
    x, axis = (x.flatten(), 0) if axis is None else (x, axis)
    values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True, dim=axis)
    places = torch.arange(inverse.numel(), device=x.device)
    first = torch.full_like(counts, inverse.numel()).scatter_reduce(0, inverse, places, "amin")
    if sorted:
        return values, first, inverse, counts
    order = first.argsort()
    return values.index_select(axis, order), first[order], order.argsort()[inverse], counts[order]


def top_k(x: Tensor, k: int, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Tensor, Tensor]:
    """The largest or smallest elements along an axis, in order, and where they are."""
    values, places = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    return values.narrow(axis, 0, k), places.narrow(axis, 0, k)


def depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """Channels moved into blocks of the image."""
    x = x if mode == "CRD" else x.unflatten(1, (blocksize**2, -1)).transpose(1, 2).flatten(1, 2)
    return F.pixel_shuffle(x, blocksize)


def space_to_depth(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """Blocks of the image moved into channels."""
    result = F.pixel_unshuffle(x, blocksize)
    return result if mode == "CRD" else result.unflatten(1, (-1, blocksize**2)).transpose(1, 2).flatten(1, 2)


def discrete_fourier(
    x: Tensor, dft_length: Any = None, axis: Any = None, *, inverse: int = 0, onesided: int = 0
) -> Tensor:
    """The Fourier transform along an axis; the last axis has one number or the real and the imaginary part."""
    axis = (-2 if axis is None else axis) % x.ndim
    parts = x if x.shape[-1] == 2 else torch.cat([x, torch.zeros_like(x)], -1)
    signal = torch.view_as_complex(parts.contiguous())
    if onesided and inverse:
        return torch.unsqueeze(torch.fft.irfft(signal, n=dft_length, dim=axis), -1)
    result = (torch.fft.ifft if inverse else torch.fft.fft)(signal, n=dft_length, dim=axis)
    result = result.narrow(axis, 0, result.shape[axis] // 2 + 1) if onesided else result
    return torch.view_as_real(result)


def short_time_fourier(
    signal: Tensor, frame_step: int, window: Any = None, frame_length: Any = None, *, onesided: int = 1
) -> Tensor:
    """Fourier transforms of overlapping frames of a signal, along its second axis."""
    frames = signal.unfold(1, frame_length or window.shape[0], frame_step)  # [batch, frames, 1 or 2, length]
    frames = frames.transpose(-1, -2) if signal.ndim == 3 else frames.unsqueeze(-1)
    return discrete_fourier(frames if window is None else frames * window.view(-1, 1), None, 2, onesided=onesided)


def non_max_suppression(
    boxes: Tensor, scores: Tensor, most: int = 0, overlap: float = 0.0, least: float = -math.inf, *,
    center_point_box: int = 0,
) -> Tensor:  # fmt: skip
    """The boxes with the best scores of each class that do not overlap better ones: rows of batch, class and box."""
    if center_point_box:
        boxes = torch.cat([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], -1)
    low, high = torch.minimum(boxes[..., :2], boxes[..., 2:]), torch.maximum(boxes[..., :2], boxes[..., 2:])
    sides = torch.minimum(high.unsqueeze(1), high.unsqueeze(2)) - torch.maximum(low.unsqueeze(1), low.unsqueeze(2))
    shared, areas = sides.clamp(min=0).prod(-1), (high - low).prod(-1)
    covers = shared / (areas.unsqueeze(1) + areas.unsqueeze(2) - shared) > overlap
    rows: list[list[int]] = []
    for batch, kind in torch.cartesian_prod(*map(torch.arange, scores.shape[:2])).tolist():
        kept: list[int] = []
        for box in scores[batch, kind].argsort(descending=True, stable=True).tolist():
            if scores[batch, kind, box] > least and len(kept) < most and not covers[batch, box, kept].any():
                kept.append(box)
        rows += [[batch, kind, box] for box in kept]
    return torch.tensor(rows, dtype=torch.long, device=boxes.device).reshape(-1, 3)

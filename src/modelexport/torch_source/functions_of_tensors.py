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
from torch.nn import functional as F  # noqa: N812


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
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        first, last, stride = slice(start, end, step).indices(x.shape[axis])
        if step > 0:
            x = x[(slice(None),) * (axis % x.ndim) + (slice(first, last, stride),)]
        else:
            places = torch.arange(first, last, stride, device=x.device)
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
    sizes = indices.shape[:batch_dims]
    batch = [
        torch.arange(size, device=x.device).view(-1, *[1] * (indices.ndim - 2 - axis))
        for axis, size in enumerate(sizes)
    ]
    return x[(*batch, *indices.long().unbind(-1))]


def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
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


def pad(x: Tensor, pads: Any, value: Any = None, axes: Any = None, *, mode: str = "constant") -> Tensor:
    """Padding; negative numbers cut."""
    axes = [axis % x.ndim for axis in axes] if axes is not None else list(range(x.ndim))
    before = dict(zip(axes, pads[: len(axes)], strict=True))
    after = dict(zip(axes, pads[len(axes) :], strict=True))
    if mode == "constant":
        value = value or 0
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


def cumulative_sum(x: Tensor, axis: int, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """Sums along an axis of all elements up to each; without itself if exclusive, from the end if reversed."""
    x = x.flip(axis) if reverse else x
    result = x.cumsum(axis, dtype=x.dtype)
    result = result - x if exclusive else result
    return result.flip(axis) if reverse else result


def one_hot(indices: Tensor, depth: Any, values: Tensor, *, axis: int = -1) -> Tensor:
    """``values[1]`` at each index and ``values[0]`` elsewhere, on a new axis."""
    depth = int(depth)
    axis = axis % (indices.ndim + 1)
    places = torch.arange(depth, device=indices.device).view(-1, *[1] * (indices.ndim - axis))
    indices = torch.where(indices < 0, indices + depth, indices)
    return torch.where(indices.unsqueeze(axis) == places, values[1], values[0])


def unique(x: Tensor, *, axis: Any = None, sorted: int = 1) -> Any:  # noqa: A002
    """Distinct elements, where each is first, which of them each element is, and how often each occurs."""
    x = x.flatten() if axis is None else x
    axis = 0 if axis is None else axis
    values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True, dim=axis)
    places = torch.arange(inverse.numel(), device=x.device)
    first = torch.full_like(counts, inverse.numel()).scatter_reduce(0, inverse, places, "amin")
    if not sorted:
        order = first.argsort()
        values, first, counts = values.index_select(axis, order), first[order], counts[order]
        inverse = order.argsort()[inverse]
    return values, first, inverse, counts


def top_k(x: Tensor, k: int, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Tensor, Tensor]:  # noqa: A002
    """The largest or smallest elements along an axis, in order, and where they are."""
    values, places = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    return values.narrow(axis, 0, k), places.narrow(axis, 0, k)


def depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """Channels moved into blocks of the image."""
    n, c, h, w = x.shape
    size = blocksize
    if mode == "DCR":
        return x.reshape(n, size, size, c // size**2, h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, -1, h * size, w * size)
    return x.reshape(n, c // size**2, size, size, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, -1, h * size, w * size)


def space_to_depth(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """Blocks of the image moved into channels."""
    (n, c, h, w), size = x.shape, blocksize
    x = x.reshape(n, c, h // size, size, w // size, size)
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    return x.permute(order).reshape(n, c * size**2, h // size, w // size)


def insert(sequence: list[Tensor], x: Tensor, place: Any = None) -> list[Tensor]:
    """A sequence with a tensor before a place, or at the end."""
    place = len(sequence) if place is None else place
    return [*sequence[:place], x, *sequence[place:]]


def resize(
    x: Tensor, roi: Any = None, scales: Any = None, sizes: Any = None, *, axes: Any = None, mode: str = "nearest",
    coordinate_transformation_mode: str = "half_pixel", nearest_mode: str = "round_prefer_floor",
    cubic_coeff_a: float = -0.75, exclude_outside: int = 0, antialias: int = 0,
) -> Tensor:  # fmt: skip
    """Interpolation along axes, one after the other."""
    places = coordinate_transformation_mode
    for number, axis in enumerate(axes if axes is not None else range(x.ndim)):
        length = x.shape[axis]
        size = int(torch.tensor(scales[number], dtype=torch.float32) * length) if scales else int(sizes[number])
        scale = scales[number] if scales else size / length
        if size == length and scale == 1:
            continue
        exact = torch.float32 if mode == "nearest" else torch.float64  # nearest pixels are found as runtimes do
        at = torch.arange(size, dtype=exact, device=x.device)
        if places == "align_corners":
            at = at * (length - 1) / (size - 1) if size > 1 else at * 0
        elif places == "asymmetric":
            at = at / scale
        elif places == "half_pixel_symmetric":
            at = length / 2 * (1 - size / (scale * length)) + (at + 0.5) / scale - 0.5
        else:
            at = (at + 0.5) / scale - 0.5 if places != "pytorch_half_pixel" or size > 1 else at * 0
        if mode == "nearest":
            near = {"floor": at.floor(), "ceil": at.ceil(), "round_prefer_ceil": (at + 0.5).floor()}
            x = x.index_select(axis, near.get(nearest_mode, (at - 0.5).ceil()).clamp(0, length - 1).long())
            continue
        spread = max(1.0, 1 / scale) if antialias else 1.0
        reach = math.ceil((2 if mode == "cubic" else 1) * spread)
        around = at.floor().unsqueeze(1) + torch.arange(1 - reach, reach + 1, device=x.device)
        apart, a = (around - at.unsqueeze(1)).abs() / spread, cubic_coeff_a
        weights = (1 - apart).clamp(min=0)
        if mode == "cubic":
            inner = ((a + 2) * apart - (a + 3)) * apart * apart + 1
            weights = torch.where(apart <= 1, inner, ((a * apart - 5 * a) * apart + 8 * a) * apart - 4 * a)
            weights = torch.where(apart < 2, weights, 0.0)
        if exclude_outside:
            weights = torch.where((around < 0) | (around >= length), 0.0, weights)
        if exclude_outside or antialias:
            weights = weights / weights.sum(1, keepdim=True)
        kernel = torch.zeros(size, length, dtype=torch.float64, device=x.device)
        kernel = kernel.scatter_add(1, around.clamp(0, length - 1).long(), weights)
        kernel = kernel.to(x.dtype) if x.is_floating_point() else kernel
        x = (x.movedim(axis, -1).to(kernel.dtype) @ kernel.T).movedim(-1, axis).to(x.dtype)
    return x


def discrete_fourier(
    x: Tensor, dft_length: Any = None, axis: Any = None, *, inverse: int = 0, onesided: int = 0
) -> Tensor:
    """The Fourier transform along an axis; the last axis has one number or the real and the imaginary part."""
    axis, length = (-2 if axis is None else axis) % x.ndim, dft_length
    if onesided and inverse:
        return torch.fft.irfft(torch.view_as_complex(x.contiguous()), n=length, dim=axis).unsqueeze(-1)
    if x.shape[-1] == 2:
        signal = torch.view_as_complex(x.contiguous())
    else:
        signal = x[..., 0]
        if onesided:
            return torch.view_as_real(torch.fft.rfft(signal, n=length, dim=axis))
        signal = torch.complex(signal, torch.zeros_like(signal))
    transform = torch.fft.ifft if inverse else torch.fft.fft
    result = torch.view_as_real(transform(signal, n=length, dim=axis))
    return result[(slice(None),) * axis + (slice(result.shape[axis] // 2 + 1),)] if onesided else result


def short_time_fourier(
    signal: Tensor, frame_step: int, window: Any = None, frame_length: Any = None, *, onesided: int = 1
) -> Tensor:
    """Fourier transforms of overlapping frames of a signal, along its second axis."""
    length = window.shape[0] if frame_length is None else frame_length
    frames = signal.unfold(1, length, frame_step)  # [batch, frames, 1 or 2, length]
    frames = frames.transpose(-1, -2) if signal.ndim == 3 else frames.unsqueeze(-1)
    frames = frames if window is None else frames * window.view(-1, 1)
    return discrete_fourier(frames, None, 2, onesided=onesided)


def non_max_suppression(
    boxes: Tensor, scores: Tensor, most: int = 0, overlap: float = 0.0, least: Any = None, *, center_point_box: int = 0
) -> Tensor:
    """The boxes with the best scores of each class that do not overlap better ones: rows of batch, class and box."""
    if center_point_box:
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

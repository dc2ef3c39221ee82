"""Translations of operators that ``torch.onnx`` does not translate, or translates wrongly: rules on operators only.

They are passed to ``torch.onnx.export(custom_translation_table=...)``, so that every node they make belongs to the FX
node that it was made for. Each docstring says what was wrong; the smallest model for each is in
``tests/capture/test_repairs.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import onnx_ir as ir
import torch
import torch.onnx
from onnxscript import opset18 as op

_INT64 = int(ir.DataType.INT64)


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """FX operator to the function that makes its ONNX nodes."""
    aten = torch.ops.aten
    return {
        aten.squeeze.dim: _squeeze,
        aten.cross_entropy_loss.default: _cross_entropy,
        aten.embedding_bag.padding_idx: _embedding_bag,
        aten.embedding_bag.default: _embedding_bag,
        aten.adaptive_max_pool2d.default: _adaptive_max_pool,
        aten.adaptive_max_pool3d.default: _adaptive_max_pool,
        aten._adaptive_avg_pool3d.default: _adaptive_average_pool,
        aten.fractional_max_pool2d.default: _fractional_max_pool,
        aten.fractional_max_pool3d.default: _fractional_max_pool,
        aten.multilabel_margin_loss.default: _multilabel_margin_loss,
        aten.rrelu.default: _rrelu,
        aten.histc.default: _histc,
    }


@contextmanager
def translations_added() -> Iterator[list[Any]]:
    """Add these translations to every call of ``torch.onnx.export`` inside the block.

    A table that the caller passes, as transformers' exporter does, takes precedence. The results of
    ``torch.onnx.export`` are in the list that this yields: that exporter keeps only the graph, not its source.
    """
    export = torch.onnx.export
    programs: list[Any] = []

    def with_more(*args: Any, custom_translation_table: dict[Any, Any] | None = None, **kwargs: Any) -> Any:
        table = {**translations(), **(custom_translation_table or {})}
        programs.append(export(*args, custom_translation_table=table, **kwargs))
        return programs[-1]

    with mock.patch.object(torch.onnx, "export", with_more):
        yield programs


def _ints(*numbers: int) -> Any:
    return op.Constant(value_ints=list(numbers))


def _table(array: np.ndarray) -> Any:
    return op.Constant(value=ir.tensor(array))


def _squeeze(self: Any, dim: int) -> Any:
    """``squeeze(dim)`` of an axis whose size is not 1 is the tensor itself; torchlib squeezes it nevertheless.

    Upstream: onnxscript ``aten_squeeze_dim``.
    """
    if not len(self.shape):
        return op.Identity(self)
    size = self.shape[dim]
    if size != 1 and (isinstance(size, int) or size.value is not None):
        # A dynamic size is not 1 either: torch.export treats a size of 1 as fixed.
        return op.Identity(self)
    return op.Squeeze(self, _ints(dim))


def _cross_entropy(
    self: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Torchlib ignores ``label_smoothing``, and treats class probabilities as labels.

    Upstream: onnxscript ``aten_cross_entropy_loss`` ("this was ignored due to ONNX not support").
    """
    names = ("none", "mean", "sum")
    probabilities = target.dtype is not None and target.dtype.is_floating_point()
    if not label_smoothing and not probabilities:
        loss, _ = op.SoftmaxCrossEntropyLoss(
            self, target, weight, reduction=names[reduction], ignore_index=ignore_index
        )
        return loss
    axis = 1 if len(self.shape) > 1 else 0
    logs = op.LogSoftmax(self, axis=axis)
    classes = op.CastLike(op.Gather(op.Shape(self), _ints(axis)), self)
    keep = op.CastLike(op.Constant(value_float=1.0 - label_smoothing), self)
    spread = op.Div(op.CastLike(op.Constant(value_float=label_smoothing), self), classes)
    rank = len(self.shape)
    by_class = op.Reshape(weight, _ints(*(-1 if i == axis else 1 for i in range(rank)))) if weight is not None else None
    weighted = logs if by_class is None else op.Mul(logs, by_class)
    if probabilities:
        smoothed = op.Add(op.Mul(target, keep), spread)
        losses = op.Neg(op.ReduceSum(op.Mul(smoothed, weighted), _ints(axis), keepdims=0))
        total = op.Size(losses)
        return _reduced(losses, op.CastLike(total, self), reduction)
    used = op.Not(op.Equal(target, op.CastLike(op.Constant(value_int=ignore_index), target)))
    index = op.Unsqueeze(op.Where(used, target, op.CastLike(op.Constant(value_int=0), target)), _ints(axis))
    mask = op.CastLike(used, self)
    chosen = op.Squeeze(op.GatherElements(weighted, index, axis=axis), _ints(axis))
    everything = op.ReduceSum(weighted, _ints(axis), keepdims=0)
    losses = op.Mul(op.Neg(op.Add(op.Mul(chosen, keep), op.Mul(everything, spread))), mask)
    if by_class is None:
        total = op.ReduceSum(mask, keepdims=0)
    else:
        total = op.ReduceSum(op.Mul(op.Gather(weight, op.Squeeze(index, _ints(axis))), mask), keepdims=0)
    return _reduced(losses, total, reduction)


def _reduced(losses: Any, total: Any, reduction: int) -> Any:
    if reduction == 0:
        return losses
    added = op.ReduceSum(losses, keepdims=0)
    return added if reduction == 2 else op.Div(added, total)


def _embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """A sum with a table that maps indices to bags, instead of torchlib's loop over a sequence.

    The loop's nodes do not refer to an FX node, so their module would be unknown.
    """
    indices, offsets = op.Cast(indices, to=_INT64), op.Cast(offsets, to=_INT64)
    starts = op.Slice(offsets, _ints(0), _ints(-1), _ints(0)) if include_last_offset else offsets
    count = op.Shape(indices)
    zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
    positions = op.Range(zero, op.Squeeze(count, _ints(0)), one)
    ends = op.Slice(op.Concat(starts, count, axis=0), _ints(1), _ints(np.iinfo(np.int64).max), _ints(0))
    row = op.Unsqueeze(positions, _ints(0))
    after = op.GreaterOrEqual(row, op.Unsqueeze(starts, _ints(1)))
    inside = op.And(after, op.Less(row, op.Unsqueeze(ends, _ints(1))))
    if padding_idx is not None:
        rows = op.Gather(op.Shape(weight), _ints(0))
        padding = _ints(padding_idx) if padding_idx >= 0 else op.Add(rows, _ints(padding_idx))
        inside = op.And(inside, op.Unsqueeze(op.Not(op.Equal(indices, padding)), _ints(0)))
    found = op.Gather(weight, indices, axis=0)
    if per_sample_weights is not None:
        found = op.Mul(found, op.Unsqueeze(per_sample_weights, _ints(1)))
    member = op.CastLike(inside, weight)
    sizes = op.ReduceSum(op.Cast(inside, to=_INT64), _ints(1), keepdims=0)
    if mode == 2:
        lowest = op.CastLike(op.Constant(value_float=float(np.finfo(np.float16).min)), weight)
        if weight.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
            lowest = op.CastLike(op.Constant(value_float=float("-inf")), weight)
        masked = op.Where(op.Unsqueeze(inside, _ints(2)), op.Unsqueeze(found, _ints(0)), lowest)
        filled = op.Unsqueeze(op.Greater(sizes, zero), _ints(1))
        nothing = op.CastLike(op.Constant(value_float=0.0), weight)
        result = op.Where(filled, op.ReduceMax(masked, _ints(1), keepdims=0), nothing)
    else:
        result = op.MatMul(member, found)
        if mode == 1:
            divisor = op.CastLike(op.Unsqueeze(op.Max(sizes, one), _ints(1)), weight)
            result = op.Div(result, divisor)
    return result, op.Identity(positions), sizes, op.Identity(offsets)


def _windows(sizes: Sequence[int], outputs: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each axis the positions in each output's window, padded with the last one, and which of them are valid."""
    tables = []
    for size, out in zip(sizes, outputs, strict=True):
        starts = [i * size // out for i in range(out)]
        ends = [-(-(i + 1) * size // out) for i in range(out)]
        longest = max(end - start for start, end in zip(starts, ends, strict=True))
        index = np.array([[min(s + k, e - 1) for k in range(longest)] for s, e in zip(starts, ends, strict=True)])
        counts = np.array([[s + k < e for k in range(longest)] for s, e in zip(starts, ends, strict=True)])
        tables.append((index.astype(np.int64), counts))
    return tables


def _flat_windows(self: Any, output_size: Sequence[int]) -> tuple[list[int], list[int], np.ndarray, np.ndarray]:
    """Sizes and outputs of the pooled axes; the flat positions in each window, and which of them are valid."""
    axes = len(output_size)
    sizes = list(self.shape[-axes:])
    if not all(isinstance(size, int) for size in sizes):
        raise ValueError(f"adaptive pooling of dynamic axes ({', '.join(map(str, sizes))}): export fixed sizes")
    outputs = [size if out is None else int(out) for size, out in zip(sizes, output_size, strict=True)]
    tables = _windows(sizes, outputs)
    cells = list(itertools.product(*(range(out) for out in outputs)))
    flat = np.array([_flat([tables[a][0][cell[a]] for a in range(axes)], sizes) for cell in cells])
    used = np.array(
        [
            np.logical_and.reduce(np.meshgrid(*[tables[a][1][cell[a]] for a in range(axes)], indexing="ij")).ravel()
            for cell in cells
        ]
    )
    return sizes, outputs, flat, used


def _flat(positions: Sequence[np.ndarray], sizes: Sequence[int]) -> np.ndarray:
    """The flat positions of all combinations of positions in several axes."""
    grids = np.meshgrid(*positions, indexing="ij")
    flat: np.ndarray = np.ravel_multi_index(tuple(grid.ravel() for grid in grids), tuple(sizes)).astype(np.int64)
    return flat


def _gathered(self: Any, axes: int, flat: np.ndarray) -> tuple[Any, Any]:
    """The elements of each window, in a last axis of their own, and the shape of the axes that are not pooled."""
    outer = op.Slice(op.Shape(self), _ints(0), _ints(len(self.shape) - axes), _ints(0))
    laid = op.Reshape(self, op.Concat(outer, _ints(-1), axis=0))
    found = op.Gather(laid, _table(flat.ravel()), axis=-1)
    return op.Reshape(found, op.Concat(outer, _ints(*flat.shape), axis=0)), outer


def _adaptive_max_pool(self: Any, output_size: Sequence[int]) -> Any:
    """torch.onnx does not translate it if the output's size does not divide the input's or the indices are used."""
    _, outputs, flat, _ = _flat_windows(self, output_size)
    windows, outer = _gathered(self, len(outputs), flat)
    return _maxima(windows, _table(flat), outer, outputs)


def _maxima(windows: Any, positions: Any, outer: Any, outputs: Sequence[int]) -> Any:
    """The maximum of each window and its position, in the shape of the output."""
    shape = op.Concat(outer, _ints(*outputs), axis=0)
    best = op.ArgMax(windows, axis=-1, keepdims=1)
    spread = op.Expand(positions, op.Shape(windows))
    index = op.GatherElements(spread, best, axis=-1)
    return op.Reshape(op.ReduceMax(windows, _ints(-1), keepdims=0), shape), op.Reshape(index, shape)


def _adaptive_average_pool(self: Any, output_size: Sequence[int]) -> Any:
    """torch.onnx does not translate it in three dimensions."""
    _, outputs, flat, used = _flat_windows(self, output_size)
    windows, outer = _gathered(self, len(outputs), flat)
    shares = used / used.sum(-1, keepdims=True)
    mean = op.ReduceSum(op.Mul(windows, op.CastLike(_table(shares), self)), _ints(-1), keepdims=0)
    return op.Reshape(mean, op.Concat(outer, _ints(*outputs), axis=0))


def _fractional_max_pool(self: Any, kernel_size: Sequence[int], output_size: Sequence[int], samples: Any) -> Any:
    """torch.onnx does not translate it. The windows begin at the random samples, an input of the operator."""
    axes = len(kernel_size)
    rank, sizes = len(self.shape), list(self.shape[-axes:])
    if rank != axes + 2 or not all(isinstance(size, int) for size in sizes):
        raise ValueError("fractional pooling needs a batch, and axes of fixed sizes")
    outer = op.Slice(op.Shape(self), _ints(0), _ints(2), _ints(0))
    flat = None
    for axis, (size, kernel, out) in enumerate(zip(sizes, kernel_size, output_size, strict=True)):
        # PyTorch stores the samples of the last axis first.
        sample = op.Gather(samples, op.Constant(value_int=axes - 1 - axis), axis=2)
        starts = _starts(op.Unsqueeze(sample, _ints(2)), size, kernel, out)
        inside = op.Add(op.Unsqueeze(starts, _ints(3)), _table(np.arange(kernel, dtype=np.int64)))
        stride = int(np.prod(sizes[axis + 1 :], dtype=np.int64))
        order = (
            [0, 0] + [out if a == axis else 1 for a in range(axes)] + [kernel if a == axis else 1 for a in range(axes)]
        )
        placed = op.Reshape(op.Mul(inside, op.Constant(value_int=stride)), _ints(*order))
        flat = placed if flat is None else op.Add(flat, placed)
    cells, length = int(np.prod(output_size)), int(np.prod(kernel_size))
    positions = op.Reshape(flat, _ints(0, 0, cells * length))
    laid = op.Reshape(self, op.Concat(outer, _ints(-1), axis=0))
    windows = op.Reshape(op.GatherElements(laid, positions, axis=2), _ints(0, 0, cells, length))
    return _maxima(windows, op.Reshape(positions, _ints(0, 0, cells, length)), outer, output_size)


def _starts(sample: Any, size: int, kernel: int, out: int) -> Any:
    """Where the windows of an axis begin, ``[N, C, out]``, as PyTorch computes it."""
    last = size - kernel
    if out == 1:
        return op.Add(op.Mul(op.Cast(sample, to=_INT64), op.Constant(value_int=0)), op.Constant(value_int=last))
    alpha = op.CastLike(op.Constant(value_float=last / (out - 1)), sample)
    steps = op.CastLike(_table(np.arange(out - 1, dtype=np.int64)), sample)
    moved = op.Cast(op.Mul(op.Add(steps, sample), alpha), to=_INT64)
    begun = op.Sub(moved, op.Cast(op.Mul(sample, alpha), to=_INT64))
    end = op.Add(op.Mul(op.Cast(sample, to=_INT64), op.Constant(value_int=0)), op.Constant(value_int=last))
    return op.Concat(begun, end, axis=2)


def _multilabel_margin_loss(self: Any, target: Any, reduction: int = 1) -> Any:
    """The exporter's decomposition computes another value.

    The labels of a row end at the first -1. For each label and each class that is not a label, ``max(0, 1 - (x[label]
    - x[class]))`` is added; the sum is divided by the number of classes.
    """
    last = len(self.shape) - 1
    target = op.Cast(target, to=_INT64)
    ended = op.Cast(op.Less(target, op.Constant(value_int=0)), to=_INT64)
    valid = op.Equal(op.CumSum(ended, op.Constant(value_int=last)), op.Constant(value_int=0))
    index = op.Where(valid, target, op.Constant(value_int=0))
    valid_number = op.CastLike(valid, self)
    label = op.Unsqueeze(op.GatherElements(self, index, axis=last), _ints(last + 1))
    classes = op.Range(
        op.Constant(value_int=0), op.Squeeze(op.Gather(op.Shape(self), _ints(last)), _ints(0)), op.Constant(value_int=1)
    )
    same = op.And(op.Equal(op.Unsqueeze(index, _ints(last + 1)), classes), op.Unsqueeze(valid, _ints(last + 1)))
    none = op.Sub(
        op.CastLike(op.Constant(value_float=1.0), self),
        op.ReduceMax(op.CastLike(same, self), _ints(last), keepdims=1),
    )
    one = op.CastLike(op.Constant(value_float=1.0), self)
    margin = op.Relu(op.Add(op.Sub(one, label), op.Unsqueeze(self, _ints(last))))
    counted = op.Mul(op.Mul(margin, none), op.Unsqueeze(valid_number, _ints(last + 1)))
    added = op.ReduceSum(counted, _ints(last, last + 1), keepdims=0)
    losses = op.Div(added, op.CastLike(op.Squeeze(op.Gather(op.Shape(self), _ints(last)), _ints(0)), self))
    return _reduced(losses, op.CastLike(op.Size(losses), self), reduction)


def _rrelu(self: Any, lower: float = 0.125, upper: float = 1 / 3, training: bool = False, generator: Any = None) -> Any:
    """In evaluation mode the slope is the mean of the bounds; the exporter looks for a translation with noise."""
    if training:
        raise ValueError("RReLU in training mode draws random slopes: put the model into evaluation mode")
    return op.LeakyRelu(self, alpha=(lower + upper) / 2)


def _histc(self: Any, bins: int = 100, min: float = 0.0, max: float = 0.0) -> Any:  # noqa: A002 - torch's names
    """torch.onnx does not translate it. Elements out of bounds are not counted; the last bin has its upper bound."""
    flat = op.Reshape(self, _ints(-1))
    low, high = (op.CastLike(op.Constant(value_float=float(bound)), self) for bound in (min, max))
    if min == max:
        low, high = op.ReduceMin(flat, keepdims=0), op.ReduceMax(flat, keepdims=0)
        alike = op.Equal(low, high)
        one = op.CastLike(op.Constant(value_float=1.0), self)
        low, high = op.Where(alike, op.Sub(low, one), low), op.Where(alike, op.Add(high, one), high)
    count = op.CastLike(op.Constant(value_int=bins), self)
    place = op.Cast(op.Floor(op.Div(op.Mul(op.Sub(flat, low), count), op.Sub(high, low))), to=_INT64)
    place = op.Min(place, op.Constant(value_int=bins - 1))
    inside = op.And(op.GreaterOrEqual(flat, low), op.LessOrEqual(flat, high))
    hits = op.And(op.Equal(op.Unsqueeze(place, _ints(1)), _table(np.arange(bins))), op.Unsqueeze(inside, _ints(1)))
    return op.ReduceSum(op.CastLike(hits, self), _ints(0), keepdims=0)

"""Pooling over windows of uneven or random places."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import nn as torchlib

from modelexport.capture.repairs.constants import INT64, ints, table
from modelexport.graph.initializers import bind_tensors


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
    outer = op.Slice(op.Shape(self), ints(0), ints(len(self.shape) - axes), ints(0))
    laid = op.Reshape(self, op.Concat(outer, ints(-1), axis=0))
    found = op.Gather(laid, table(flat.ravel()), axis=-1)
    return op.Reshape(found, op.Concat(outer, ints(*flat.shape), axis=0)), outer


def adaptive_max_pool(self: Any, output_size: Sequence[int]) -> Any:
    """torch.onnx does not translate it if the output's size does not divide the input's or the indices are used."""
    _, outputs, flat, _ = _flat_windows(self, output_size)
    windows, outer = _gathered(self, len(outputs), flat)
    return _maxima(windows, table(flat), outer, outputs)


def _maxima(windows: Any, positions: Any, outer: Any, outputs: Sequence[int]) -> Any:
    """The maximum of each window and its position, in the shape of the output."""
    shape = op.Concat(outer, ints(*outputs), axis=0)
    best = op.ArgMax(windows, axis=-1, keepdims=1)
    spread = op.Expand(positions, op.Shape(windows))
    index = op.GatherElements(spread, best, axis=-1)
    return op.Reshape(op.ReduceMax(windows, ints(-1), keepdims=0), shape), op.Reshape(index, shape)


def adaptive_average_pool(self: Any, output_size: Sequence[int]) -> Any:
    """torch.onnx does not translate it in three dimensions."""
    _, outputs, flat, used = _flat_windows(self, output_size)
    windows, outer = _gathered(self, len(outputs), flat)
    shares = used / used.sum(-1, keepdims=True)
    mean = op.ReduceSum(op.Mul(windows, op.CastLike(table(shares), self)), ints(-1), keepdims=0)
    return op.Reshape(mean, op.Concat(outer, ints(*outputs), axis=0))


def fractional_max_pool(self: Any, kernel_size: Sequence[int], output_size: Sequence[int], samples: Any) -> Any:
    """torch.onnx does not translate it. The windows begin at the random samples, an input of the operator."""
    axes = len(kernel_size)
    rank, sizes = len(self.shape), list(self.shape[-axes:])
    if rank != axes + 2 or not all(isinstance(size, int) for size in sizes):
        raise ValueError("fractional pooling needs a batch, and axes of fixed sizes")
    outer = op.Slice(op.Shape(self), ints(0), ints(2), ints(0))
    flat = None
    for axis, (size, kernel, out) in enumerate(zip(sizes, kernel_size, output_size, strict=True)):
        # PyTorch stores the samples of the last axis first.
        sample = op.Gather(samples, op.Constant(value_int=axes - 1 - axis), axis=2)
        starts = _starts(op.Unsqueeze(sample, ints(2)), size, kernel, out)
        inside = op.Add(op.Unsqueeze(starts, ints(3)), table(np.arange(kernel, dtype=np.int64)))
        stride = int(np.prod(sizes[axis + 1 :], dtype=np.int64))
        order = (
            [0, 0] + [out if a == axis else 1 for a in range(axes)] + [kernel if a == axis else 1 for a in range(axes)]
        )
        placed = op.Reshape(op.Mul(inside, op.Constant(value_int=stride)), ints(*order))
        flat = placed if flat is None else op.Add(flat, placed)
    cells, length = int(np.prod(output_size)), int(np.prod(kernel_size))
    positions = op.Reshape(flat, ints(0, 0, cells * length))
    laid = op.Reshape(self, op.Concat(outer, ints(-1), axis=0))
    windows = op.Reshape(op.GatherElements(laid, positions, axis=2), ints(0, 0, cells, length))
    return _maxima(windows, op.Reshape(positions, ints(0, 0, cells, length)), outer, output_size)


def _starts(sample: Any, size: int, kernel: int, out: int) -> Any:
    """Where the windows of an axis begin, ``[N, C, out]``, as PyTorch computes it."""
    last = size - kernel
    if out == 1:
        return op.Add(op.Mul(op.Cast(sample, to=INT64), op.Constant(value_int=0)), op.Constant(value_int=last))
    alpha = op.CastLike(op.Constant(value_float=last / (out - 1)), sample)
    steps = op.CastLike(table(np.arange(out - 1, dtype=np.int64)), sample)
    moved = op.Cast(op.Mul(op.Add(steps, sample), alpha), to=INT64)
    begun = op.Sub(moved, op.Cast(op.Mul(sample, alpha), to=INT64))
    end = op.Add(op.Mul(op.Cast(sample, to=INT64), op.Constant(value_int=0)), op.Constant(value_int=last))
    return op.Concat(begun, end, axis=2)


def max_pools() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Torchlib's pooling, after which ONNX Runtime does not fold a ``Pad`` of zeros into it.

    Its padding counts for nothing, and zeros count. Runtimes compare with the number zero, which -0.0 is not, bit by
    bit. https://github.com/onnx/optimizer/pull/318 corrects the same rule in another tool.
    """
    aten = torch.ops.aten
    known = {
        aten.max_pool1d.default: "aten_max_pool1d",
        aten.max_pool1d_with_indices.default: "aten_max_pool1d_with_indices",
        aten.max_pool2d.default: "aten_max_pool2d",
        aten.max_pool2d_with_indices.default: "aten_max_pool2d_with_indices",
        aten.max_pool3d.default: "aten_max_pool3d",
        aten.max_pool3d_with_indices.default: "aten_max_pool3d_with_indices",
    }
    return {
        operator: _after_pads(getattr(torchlib, name)) for operator, name in known.items() if hasattr(torchlib, name)
    }


def _after_pads(pool: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(pool)
    def pooled(self: Any, *args: Any, **kwargs: Any) -> Any:
        pad = self.producer()
        if pad is not None and pad.op_type == "Pad" and pad.graph is not None:
            constant = _before_casts(pad.inputs[2] if len(pad.inputs) > 2 else None)
            value = None if constant is None else ir.convenience.get_const_tensor(constant)
            if constant is None or (value is not None and not value.numpy().any()):
                _pad_with_negative_zero(pad, self.dtype)
        return pool(self, *args, **kwargs)

    return pooled


def _pad_with_negative_zero(pad: ir.Node, dtype: ir.DataType) -> None:
    """Change the constant of a ``Pad`` in place, so that it still belongs to the call that pads."""
    zero = ir.tensor(np.array(-0.0, dtype=dtype.numpy()))
    node = ir.Node("", "Constant", [], [ir.AttrTensor("value", zero)], metadata_props=dict(pad.metadata_props))
    node.meta.update(pad.meta)
    value = node.outputs[0]
    value.name = f"{pad.outputs[0].name}_zero"
    bind_tensors({value: zero})
    value.shape, value.type = ir.Shape([]), ir.TensorType(dtype)
    assert pad.graph is not None
    pad.graph.insert_before(pad, node)
    if len(pad.inputs) < 3:
        pad.resize_inputs(3)
    pad.replace_input_with(2, value)


def _before_casts(value: ir.Value | None) -> ir.Value | None:
    """The value that another type of number was made of."""
    while value is not None and (maker := value.producer()) is not None and maker.op_type in ("Cast", "CastLike"):
        value = maker.inputs[0]
    return value

"""Which elements go where: squeezing, parts, writes by masks and indices, counting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops.core import aten_arange_start, aten_index_put

from modelexport.capture.repairs.translation_constants import INT64, ints, table


def squeeze(self: Any, dim: int) -> Any:
    """``squeeze(dim)`` of an axis whose size is not 1 is the tensor itself; torchlib squeezes it nevertheless.

    Upstream: https://github.com/onnx/onnx/issues/3764.
    """
    if not len(self.shape):
        return op.Identity(self)
    size = self.shape[dim]
    if size != 1 and (isinstance(size, int) or size.value is not None):
        # A dynamic size is not 1 either: torch.export treats a size of 1 as fixed.
        return op.Identity(self)
    return op.Squeeze(self, ints(dim))


def split(self: Any, split_size: Any, dim: int = 0) -> Any:
    """``split``, as in ``chunk``, of dynamic sizes: by the sizes of its parts, so that the graph knows their number.

    The optimizer of onnxscript fails on a sequence of unknown length.
    """
    size = self.shape[dim]
    if isinstance(split_size, int) and isinstance(size, int):
        return NotImplemented
    whole = int((size + split_size - 1) // split_size) - 1
    return torch.split_with_sizes(self, [*[split_size] * whole, size - whole * split_size], dim)


def repeated(self: Any, repeats: Any, dim: int | None = None, *, output_size: Any = None) -> Any:
    """``repeat_interleave`` as often as a size says, which torchlib takes for one."""
    if not isinstance(repeats, torch.SymInt):
        return NotImplemented
    whole = self.reshape(-1) if dim is None else self
    axis = 0 if dim is None else dim % self.dim()
    sizes = [-1] * (axis + 1) + [repeats] + [-1] * (whole.dim() - axis - 1)
    return whole.unsqueeze(axis + 1).expand(sizes).flatten(axis, axis + 1)


def with_long_indices(operator: Any) -> Callable[..., Any]:
    """Indices as int64: ``GatherND`` takes no others, and torchlib compares those of different types."""

    def indexed(self: Any, indices: Sequence[Any], *others: Any) -> Any:
        kinds = {index.dtype for index in indices if index is not None}
        if kinds <= {torch.long} or kinds & {torch.bool, torch.uint8}:  # these are masks
            return NotImplemented
        return operator(self, [index if index is None else index.long() for index in indices], *others)

    return indexed


def index_put(self: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """Torchlib's, with indices of the type that ONNX takes, and without indices where a mask writes the same values."""
    mask, *others = indices
    if mask is None or mask.dtype != ir.DataType.BOOL or any(index is not None for index in others):
        return aten_index_put(self, [_widened(index) for index in indices], values, accumulate)
    inner = len(self.shape) - len(mask.shape)
    rows = len(values.shape) - inner
    if accumulate or rows > 1 or (rows == 1 and values.shape[0] != 1):
        return aten_index_put(self, [mask], values, accumulate)
    for _ in range(inner):
        mask = op.Unsqueeze(mask, ints(-1))
    return op.Where(mask, values, self)


def _widened(index: Any) -> Any:
    if index is None or index.dtype in (ir.DataType.BOOL, ir.DataType.INT64):
        return index
    wide = op.Cast(index, to=INT64)
    wide.shape, wide.dtype = index.shape, ir.DataType.INT64
    return wide


def unique_in_turn(self: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None) -> Any:
    """``unique_consecutive``; torchlib's is for integers, and takes the largest of them for one that does not occur."""
    if dim is not None and len(self.shape) != 1:
        raise ValueError("unique_consecutive of whole rows is not translated: compare the rows, or leave out dim")
    flat = op.Reshape(self, ints(-1))
    count = op.Shape(flat)
    later, earlier = op.Slice(flat, ints(1), count, ints(0)), op.Slice(flat, ints(0), ints(-1), ints(0))
    new = op.Concat(table(np.array([True])), op.Not(op.Equal(later, earlier)), axis=0)
    new = op.Slice(new, ints(0), count, ints(0))  # of no elements none is the first
    inverse = op.Sub(op.CumSum(op.Cast(new, to=INT64), op.Constant(value_int=0)), ints(1))
    places = op.Range(op.Constant(value_int=0), op.Squeeze(count, ints(0)), op.Constant(value_int=1))
    starts = op.Compress(places, new, axis=0)
    ends = op.Slice(op.Concat(starts, count, axis=0), ints(1), ints(np.iinfo(np.int64).max), ints(0))
    return op.Compress(flat, new, axis=0), op.Reshape(inverse, op.Shape(self)), op.Sub(ends, starts)


def masked_select(self: Any, mask: Any) -> Any:
    """``masked_select``, which torch.onnx does not translate: ``Compress`` of the flattened tensor."""
    wide = op.Expand(self, op.Shape(mask))
    return op.Compress(op.Reshape(wide, ints(-1)), op.Reshape(op.Expand(mask, op.Shape(wide)), ints(-1)), axis=0)


def numbers_from(start: Any, end: Any, dtype: int = -1, **options: Any) -> Any:
    """``arange`` of a whole and a fractional bound has the default type; torchlib mixes the types of both."""
    if dtype in (None, -1) and any(map(_is_fractional, (start, end))):
        dtype = ir.DataType.DOUBLE if torch.get_default_dtype() is torch.float64 else ir.DataType.FLOAT
    return aten_arange_start(start, end, dtype=-1 if dtype is None else dtype)


def _is_fractional(number: Any) -> bool:
    """Whether a number of Python, or the value of the graph that is one, is a ``float``."""
    if isinstance(number, ir.Value):
        return number.dtype is not None and number.dtype.is_floating_point()
    return isinstance(number, float)


def with_source_of_index(operator: Any) -> Callable[..., Any]:
    """``scatter`` of a source that is larger than the index: ONNX's has one element for each index."""

    def scattered(self: Any, dim: int, index: Any, src: Any) -> Any:
        larger = [axis for axis in range(index.dim()) if str(src.shape[axis]) != str(index.shape[axis])]
        for axis in larger:
            src = src.narrow(axis, 0, index.shape[axis])
        return operator(self, dim, index, src) if larger else NotImplemented

    return scattered


def adding_what_is_written_twice(opset: int, translate: Callable[..., Any]) -> Callable[..., Any]:
    """``translate``, the exporter's function for a node of a trace, as one whose writes add where PyTorch's do.

    The exporter's own write replaces, so that only the last to an element is left; ONNX's writes add from opset 16 on.
    """

    def added(graph: Any, block: Any, node: Any, inputs: Any, env: Any, known: Any, made: Any, *how: Any) -> Any:
        results = translate(graph, block, node, inputs, env, known, made, *how)
        if _adds(node):
            writes = [new for new in made if new.kind() in _WRITES]
            if not writes:
                raise NotImplementedError("a write by a mask that adds is not translated")
            if opset < _FIRST_THAT_ADDS:
                raise NotImplementedError(f"a write that adds needs opset {_FIRST_THAT_ADDS}, and not {opset}")
            for write in writes:
                write.s_("reduction", "add")
        return results

    return added


def _adds(node: torch.Node) -> bool:
    """Whether an operation of a trace adds all that it writes to one element."""
    kind = node.kind().removeprefix("aten::").rstrip("_")
    return kind in ("scatter_add", "index_add") or (kind == "index_put" and bool(list(node.inputs())[3].toIValue()))


_WRITES = ("onnx::ScatterND", "onnx::ScatterElements", "onnx::Scatter")
_FIRST_THAT_ADDS = 16
"""The opset in which ``ScatterND`` and ``ScatterElements`` got the attribute ``reduction``."""

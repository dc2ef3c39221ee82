"""What depends on the order of elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnxscript import opset18 as op

from modelexport.capture.repairs.constants import DOUBLE, INT64, ints


def median(self: Any, dim: int = -1, keepdim: bool = False) -> Any:
    """Nothing translates it. Of an even number of elements it is the lower of the middle two."""
    length = op.Gather(op.Shape(self), ints(dim))
    return _kth(self, op.Div(op.Add(length, ints(1)), ints(2)), dim, keepdim)


def median_of_all(self: Any) -> Any:
    """The same of all elements."""
    flat = op.Reshape(self, ints(-1))
    values, _ = _kth(flat, op.Div(op.Add(op.Shape(flat), ints(1)), ints(2)), 0, False)
    return values


def kth_value(self: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """Nothing translates it."""
    return _kth(self, ints(k), dim, keepdim)


def _kth(self: Any, k: Any, dim: int, keepdim: bool) -> Any:
    values, indices = op.TopK(self, k, axis=dim, largest=0, sorted=1)
    last = op.Sub(k, ints(1))
    found = op.Gather(values, last, axis=dim), op.Gather(indices, last, axis=dim)
    return found if keepdim else tuple(op.Squeeze(one, ints(dim)) for one in found)


def largest(self: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    """``amax``, also of all elements, for which torchlib lacks an axis."""
    return op.ReduceMax(self, *([ints(*dim)] if dim else []), keepdims=int(keepdim))


def smallest(self: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    """``amin``, likewise."""
    return op.ReduceMin(self, *([ints(*dim)] if dim else []), keepdims=int(keepdim))


def running_maximum(self: Any, dim: int) -> Any:
    """Nothing translates it. A square table of which elements lie before which, so that any length will do."""
    return _running(self, dim, 1)


def running_minimum(self: Any, dim: int) -> Any:
    """The same of the smallest."""
    return _running(self, dim, -1)


def _running(self: Any, dim: int, sign: int) -> Any:
    rank = len(self.shape)
    if not rank:
        return op.Identity(self), op.Constant(value_int=0)
    axis = dim % rank
    order = [i for i in range(rank) if i != axis] + [axis]
    back = [order.index(i) for i in range(rank)]
    given = op.Transpose(self, perm=order)
    given = given if sign > 0 else op.Neg(given)
    length = op.Squeeze(op.Gather(op.Shape(self), ints(axis)), ints(0))
    places = op.Range(op.Constant(value_int=0), length, op.Constant(value_int=1))
    before = op.LessOrEqual(places, op.Unsqueeze(places, ints(1)))
    # The first element, since the smallest number of a type may be among the elements.
    first = op.Slice(given, ints(0), ints(1), ints(-1))
    rows = op.Where(before, op.Unsqueeze(given, ints(-2)), op.Unsqueeze(first, ints(-2)))
    largest = op.ReduceMax(rows, ints(-1), keepdims=0)
    same = op.And(op.Equal(rows, op.Unsqueeze(largest, ints(-1))), before)
    index = op.ReduceMax(op.Where(same, places, op.Constant(value_int=0)), ints(-1), keepdims=0)
    largest = largest if sign > 0 else op.Neg(largest)
    return op.Transpose(largest, perm=back), op.Transpose(index, perm=back)


def search(
    sorted_sequence: Any,
    self: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """Nothing translates it. How many elements of a sequence are below, or up to, each value."""
    if sorter is not None:
        sorted_sequence = op.GatherElements(sorted_sequence, sorter, axis=-1)
    after = right or side == "right"
    row = op.Unsqueeze(sorted_sequence, ints(-2)) if len(sorted_sequence.shape) > 1 else sorted_sequence
    value = op.Unsqueeze(self, ints(-1))
    if row.dtype != value.dtype:
        row, value = op.Cast(row, to=_FLOATS), op.Cast(value, to=_FLOATS)
    below = op.LessOrEqual(row, value) if after else op.Less(row, value)
    count = op.ReduceSum(op.Cast(below, to=INT64), ints(-1), keepdims=0)
    return op.Cast(count, to=6) if out_int32 else count


_FLOATS = DOUBLE


def bucket(self: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    """The same with its arguments the other way round."""
    return search(boundaries, self, out_int32=out_int32, right=right)

"""Linear algebra: ONNX has products and determinants. The rest is written out, for matrices of a fixed size.

Upstream: https://github.com/pytorch/pytorch/issues/107948 (`linalg.inv`).
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from onnxscript import opset18 as op

from modelexport.capture.repairs.constants import ints, number, table

_LARGEST = 64
"""Rows of a matrix that is worked on row by row: each is about ten nodes."""


def inverse(A: Any) -> Any:
    """Gauss and Jordan's elimination with the largest pivot of each column.

    Registered under this name as well, because its decomposition has an assertion that nothing translates.
    """
    size = _size(A)
    unit = op.Expand(op.CastLike(table(np.eye(size)), A), op.Shape(A))
    return _eliminated(A, unit, size)


def inverse_ex(A: Any, *, check_errors: bool = False) -> Any:
    """The same with a sign of success."""
    return inverse(A), op.Constant(value=_no_error())


def solve(A: Any, B: Any, *, left: bool = True) -> Any:
    """The same, of a matrix and its right sides."""
    size, rank = _size(A), len(A.shape)
    vector = len(B.shape) == rank - 1
    right = op.Unsqueeze(B, ints(-1)) if vector else B
    if left:
        found = _eliminated(A, right, size)
    else:
        found = _transposed(_eliminated(_transposed(A, rank), _transposed(right, rank), size), rank)
    return op.Squeeze(found, ints(-1)) if vector else found


def solve_ex(A: Any, B: Any, *, left: bool = True, check_errors: bool = False) -> Any:
    """The same with a decomposition, which is not computed, and a sign of success."""
    info = op.Constant(value=_no_error())
    return solve(A, B, left=left), op.Identity(A), info, info


def cholesky_ex(self: Any, *, upper: bool = False, check_errors: bool = False) -> Any:
    """The same with a sign of success."""
    return cholesky(self, upper=upper), op.Constant(value=_no_error())


def cholesky(self: Any, *, upper: bool = False) -> Any:
    """Column by column."""
    size, rank = _size(self), len(self.shape)
    columns: list[Any] = []
    for j in range(size):
        column = _part(self, j, size, j)
        if columns:
            known = op.Concat(*columns, axis=-1)
            row = op.Slice(known, ints(j), ints(j + 1), ints(-2))
            below = op.Slice(known, ints(j), ints(size), ints(-2))
            column = op.Sub(column, op.MatMul(below, _transposed(row, rank)))
        corner = op.Sqrt(op.Slice(column, ints(0), ints(1), ints(-2)))
        column = op.Div(column, corner)
        pads = [0] * (2 * rank)
        pads[rank - 2] = j
        columns.append(op.Pad(column, ints(*pads), number(0.0, self)))
    lower = op.Concat(*columns, axis=-1) if size > 1 else columns[0]
    return _transposed(lower, rank) if upper else lower


def matrix_exponential(self: Any) -> Any:
    """The series of a matrix a 64th as large, squared six times."""
    size = _size(self)
    small = op.Div(self, number(2.0**_HALVINGS, self))
    unit = op.CastLike(table(np.eye(size)), self)
    # From the highest term down: 1 + a (1 + a/2 (1 + a/3 (...))).
    total = op.Add(unit, op.Div(small, number(_TERMS, self)))
    for term in range(_TERMS - 1, 0, -1):
        total = op.Add(unit, op.Div(op.MatMul(small, total), number(term, self)))
    for _ in range(_HALVINGS):
        total = op.MatMul(total, total)
    return total


_HALVINGS, _TERMS = 6, 10


def distances(x1: Any, x2: Any, p: float, compute_mode: int | None = None) -> Any:
    """Nothing translates ``cdist``. From the differences themselves, as PyTorch does for few points."""
    return _norm(op.Sub(op.Unsqueeze(x1, ints(-2)), op.Unsqueeze(x2, ints(-3))), p)


def distances_within(self: Any, p: float = 2.0) -> Any:
    """``pdist``: those of each pair of rows once."""
    rows = self.shape[0]
    if not isinstance(rows, int):
        raise ValueError("pdist of an open number of rows: export fixed sizes")
    pairs = np.array(list(itertools.combinations(range(rows), 2)), dtype=np.int64).reshape(-1, 2)
    return _norm(op.Sub(op.Gather(self, table(pairs[:, 0])), op.Gather(self, table(pairs[:, 1]))), p)


def _norm(difference: Any, p: float) -> Any:
    size = op.Abs(difference)
    if p == 0:
        return op.ReduceSum(op.CastLike(op.Greater(size, number(0.0, size)), size), ints(-1), keepdims=0)
    if p == 1:
        return op.ReduceSum(size, ints(-1), keepdims=0)
    if p == 2:
        return op.Sqrt(op.ReduceSumSquare(size, ints(-1), keepdims=0))
    if p == float("inf"):
        return op.ReduceMax(size, ints(-1), keepdims=0)
    return op.Pow(op.ReduceSum(op.Pow(size, number(p, size)), ints(-1), keepdims=0), number(1 / p, size))


def _size(matrix: Any) -> int:
    size = matrix.shape[-1]
    if not isinstance(size, int) or size > _LARGEST:
        raise ValueError(
            f"linear algebra of matrices of {size} rows: up to {_LARGEST}, and a fixed number, are exported"
        )
    return size


def _no_error() -> Any:
    import onnx_ir as ir

    return ir.tensor(np.array(0, dtype=np.int32))


def _transposed(matrix: Any, rank: int) -> Any:
    return op.Transpose(matrix, perm=[*range(rank - 2), rank - 1, rank - 2])


def _part(matrix: Any, start: int, end: int, column: int) -> Any:
    """Some rows of a column."""
    return op.Slice(matrix, ints(start, column), ints(end, column + 1), ints(-2, -1))


def _eliminated(matrix: Any, right: Any, size: int) -> Any:
    """What ``matrix`` has to be multiplied with to give ``right``."""
    whole = op.Concat(matrix, right, axis=-1)
    rows = table(np.arange(size, dtype=np.int64).reshape(-1, 1))
    for k in range(size):
        here = table((np.arange(size) == k).reshape(-1, 1))
        column = op.Abs(_part(whole, 0, size, k))
        done = table((np.arange(size) < k).reshape(-1, 1))
        best = op.ArgMax(op.Where(done, number(-1.0, matrix), column), axis=-2, keepdims=1)
        there = op.Equal(rows, best)
        row = op.Slice(whole, ints(k), ints(k + 1), ints(-2))
        pivot = op.ReduceSum(op.Where(there, whole, number(0.0, matrix)), ints(-2), keepdims=1)
        whole = op.Where(there, row, whole)
        pivot = op.Div(pivot, _part(pivot, 0, 1, k))
        rest = op.Sub(whole, op.Mul(_part(whole, 0, size, k), pivot))
        whole = op.Where(here, pivot, rest)
    return op.Slice(whole, ints(size), ints(np.iinfo(np.int64).max), ints(-1))

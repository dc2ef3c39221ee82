"""Linear algebra: ONNX has products and determinants. The rest is written out, for matrices of a fixed size.

Upstream: https://github.com/pytorch/pytorch/issues/107948 (`linalg.inv`).
"""

from __future__ import annotations

from typing import Any

import torch

_MOST_ROWS = 64
"""Rows of a matrix that is worked on row by row: each is about ten nodes."""


def inverse(A: Any) -> Any:
    """Gauss and Jordan's elimination with the largest pivot of each column."""
    return _eliminated(A, torch.eye(_size(A), dtype=A.dtype).expand(A.shape))


def inverse_ex(A: Any, *, check_errors: bool = False) -> Any:
    """The same with a sign of success."""
    return inverse(A), _no_error(A)


def solve(A: Any, B: Any, *, left: bool = True) -> Any:
    """The same, of a matrix and its right sides."""
    vector = B.dim() == A.dim() - 1
    right = B.unsqueeze(-1) if vector else B
    solution = _eliminated(A, right) if left else _eliminated(A.mT, right.mT).mT
    return solution.squeeze(-1) if vector else solution


def solve_ex(A: Any, B: Any, *, left: bool = True, check_errors: bool = False) -> Any:
    """The same with a decomposition, which is not computed, and a sign of success."""
    return solve(A, B, left=left), A.clone(), _no_error(A), _no_error(A)


def cholesky(self: Any, *, upper: bool = False) -> Any:
    """Column by column."""
    columns: list[Any] = []
    for j in range(_size(self)):
        column = self[..., j:, j : j + 1]
        if columns:
            known = torch.cat(columns, -1)[..., j:, :]
            column = column - known @ known[..., :1, :].mT
        columns.append(torch.nn.functional.pad(column / column[..., :1, :].sqrt(), (0, 0, j, 0)))
    lower = torch.cat(columns, -1)
    return lower.mT if upper else lower


def cholesky_ex(self: Any, *, upper: bool = False, check_errors: bool = False) -> Any:
    """The same with a sign of success."""
    return cholesky(self, upper=upper), _no_error(self)


def cholesky_solve(self: Any, factor: Any, upper: bool = False) -> Any:
    """Two triangular systems."""
    lower = factor.mH if upper else factor
    between = torch.linalg.solve_triangular(lower, self, upper=False)
    return torch.linalg.solve_triangular(lower.mH, between, upper=True)


def solve_triangular(self: Any, B: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    """Solve a triangular system like any other one, after the other triangle is set to zero."""
    triangle = torch.triu(self, 1 if unitriangular else 0) if upper else torch.tril(self, -1 if unitriangular else 0)
    if unitriangular:
        triangle = triangle + torch.eye(self.shape[-1], dtype=self.dtype)
    outer = torch.broadcast_shapes(triangle.shape[:-2], B.shape[:-2])
    right = B.expand(*outer, *B.shape[-2:])
    return torch.linalg.solve(triangle.expand(*outer, *triangle.shape[-2:]), right, left=left)


def sign_and_logarithm(A: Any) -> Any:
    """``slogdet`` by the determinant. Its factors, which nothing uses, are the matrix."""
    determinant = torch.linalg.det(A)
    pivots = torch.zeros(A.shape[:-1], dtype=torch.int32)
    return torch.sign(determinant), torch.log(torch.abs(determinant)), A, pivots


def matrix_exponential(self: Any) -> Any:
    """The series of a matrix a 64th as large, squared six times."""
    small = self / 2.0**_HALVINGS
    unit = torch.eye(_size(self), dtype=self.dtype)
    # From the highest term down: 1 + a (1 + a/2 (1 + a/3 (...))).
    total = unit + small / _TERMS
    for term in range(_TERMS - 1, 0, -1):
        total = unit + small @ total / term
    for _ in range(_HALVINGS):
        total = total @ total
    return total


_HALVINGS, _TERMS = 6, 10


def product_of_reflections(input: Any, tau: Any) -> Any:
    """``householder_product``: the reflections of the columns one after another, from the last to the first."""
    rows, columns = input.shape[-2:]
    unit = torch.eye(rows, columns, dtype=input.dtype)
    vectors = input.tril(-1) + unit
    product = unit.expand(input.shape)
    for k in reversed(range(tau.shape[-1])):
        v = vectors[..., k : k + 1]
        product = product - tau[..., k, None, None] * v @ (v.mH @ product)
    return product


def reflections(A: Any, mode: str = "reduced") -> Any:
    """``qr`` by Householder's reflections, in LAPACK's signs."""
    rows, columns = A.shape[-2:]
    count = min(rows, columns)
    right = A
    left = torch.eye(rows, dtype=A.dtype).expand(*A.shape[:-2], rows, rows)
    places = torch.arange(rows)
    for k in range(count if rows > columns else count - 1):
        column = torch.where(places >= k, right[..., k], 0)
        first = column[..., k : k + 1]
        length = torch.linalg.vector_norm(column, dim=-1, keepdim=True) * torch.where(first >= 0, -1.0, 1.0).to(A.dtype)
        v = column - torch.where(places == k, length, 0)
        square = (v * v).sum(-1)[..., None, None]
        v = v[..., None]
        share = torch.where(square > 0, 2 / torch.where(square > 0, square, 1), 0)
        right = right - share * v @ (v.mT @ right)
        left = left - share * (left @ v) @ v.mT
    if mode == "complete":
        return left, torch.triu(right)
    right = torch.triu(right[..., :count, :])
    return (left[..., :count] if mode == "reduced" else A.new_zeros(0)), right


def distances(x1: Any, x2: Any, p: float, compute_mode: int | None = None) -> Any:
    """``cdist``, from the differences themselves, as PyTorch does for few points."""
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


def distances_within(self: Any, p: float = 2.0) -> Any:
    """``pdist``: those of each pair of rows once."""
    rows = self.shape[0]
    if not isinstance(rows, int):
        raise ValueError("pdist of an open number of rows: export fixed sizes")
    pairs = [self[row : row + 1] - self[row + 1 :] for row in range(rows - 1)]
    return torch.linalg.vector_norm(torch.cat([*pairs, self[:0]]), p, -1)


def _size(matrix: Any) -> int:
    size = matrix.shape[-1]
    if not isinstance(size, int) or size > _MOST_ROWS:
        raise ValueError(
            f"linear algebra of matrices of {size} rows: up to {_MOST_ROWS}, and a fixed number, are exported"
        )
    return size


def _no_error(matrix: Any) -> Any:
    return torch.zeros(matrix.shape[:-2], dtype=torch.int32)


def _eliminated(matrix: Any, right: Any) -> Any:
    """The solution ``x`` of ``matrix @ x = right``, by elimination."""
    size = _size(matrix)
    whole = torch.cat([matrix, right], -1)
    rows = torch.arange(size).unsqueeze(-1)
    for k in range(size):
        column = torch.where(rows < k, -1, whole[..., k : k + 1].abs())
        there = rows == column.argmax(-2, keepdim=True)
        row = whole[..., k : k + 1, :]
        pivot = torch.where(there, whole, 0).sum(-2, keepdim=True)
        whole = torch.where(there, row, whole)
        pivot = pivot / pivot[..., k : k + 1]
        whole = torch.where(rows == k, pivot, whole - whole[..., k : k + 1] * pivot)
    return whole[..., size:]

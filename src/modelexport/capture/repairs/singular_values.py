"""Singular values and eigenvalues of symmetric matrices, of a fixed size: ONNX has neither.

Jacobi's method from one side turns the columns of a matrix by pairs until they are orthogonal: their norms are then the
singular values (G. Golub and C. Van Loan, "Matrix Computations", 8.6.3). Half of the columns are turned with the other
half at once, and exchanged as the players of a tournament, so that each pair meets once in a sweep.
"""

from __future__ import annotations

from typing import Any

import torch

_COLUMNS = 24
"""Columns of a matrix: each step is about 25 nodes, and there are ``_SWEEPS`` times as many steps as columns."""
_SWEEPS = 8


def singular_values(
    A: Any, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Any, Any, Any]:
    """``svd``: the signs of the singular vectors are any, as in PyTorch.

    Raises:
        ValueError: The matrix is too large or of an open size, or ``full_matrices`` asks for more vectors than it has.
    """
    rows, columns = A.shape[-2:]
    if full_matrices and compute_uv and rows != columns:
        raise ValueError("svd with full_matrices: only the vectors of singular values are exported")
    if compute_uv and rows < columns:
        u, s, vh = singular_values(A.mH, driver=driver)
        return vh.mH, s, u.mH
    tall = A if rows >= columns else A.mH
    orthogonal, turned = _orthogonal(tall)
    norms = torch.linalg.vector_norm(orthogonal, dim=-2)
    s, order = torch.sort(norms, dim=-1, descending=True)
    if not compute_uv:
        return A.new_empty(0), s, A.new_empty(0)
    orthogonal, turned = (_in_order(matrix, order) for matrix in (orthogonal, turned))
    return orthogonal / torch.where(s == 0, 1, s).unsqueeze(-2), s, turned.mH


def pseudo_inverse(self: Any, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Any:
    """``pinv``: singular values below a limit count as zero."""
    u, s, vh = singular_values(torch.tril(self) + torch.tril(self, -1).mT if hermitian else self)
    if rtol is None:
        rtol = 0.0 if atol is not None else max(self.shape[-2:]) * torch.finfo(self.dtype).eps
    limit = rtol * s.amax(-1) if atol is None else torch.maximum(atol, rtol * s.amax(-1))
    inverse = torch.where(s > limit.unsqueeze(-1), 1 / torch.where(s == 0, 1, s), 0)
    return vh.mT * inverse.unsqueeze(-2) @ u.mT


def eigenvalues(A: Any, UPLO: str = "L", compute_v: bool = True) -> tuple[Any, Any]:
    """``eigh``, from the singular values of a matrix that is moved so far that all its eigenvalues are positive."""
    half = torch.tril(A) if UPLO.upper() == "L" else torch.triu(A)
    whole = half + half.mT - torch.diag_embed(torch.diagonal(A, dim1=-2, dim2=-1))
    far = torch.linalg.vector_norm(whole, dim=(-2, -1), keepdim=True)
    orthogonal, turned = _orthogonal(whole + far * torch.eye(A.shape[-1], dtype=A.dtype))
    values, order = torch.sort(torch.linalg.vector_norm(orthogonal, dim=-2), dim=-1)
    return values - far.squeeze(-1), _in_order(turned, order) if compute_v else A.new_empty(0)


def _in_order(matrix: Any, order: Any) -> Any:
    return torch.gather(matrix, -1, order.unsqueeze(-2).expand(matrix.shape))


def _orthogonal(matrix: Any) -> tuple[Any, Any]:
    """The product of a matrix and a rotation that makes its columns orthogonal, and the rotation.

    Raises:
        ValueError: The matrix is too large, complex, or has a dynamic axis.
    """
    rows, columns = matrix.shape[-2:]
    if not isinstance(columns, int) or columns > _COLUMNS or matrix.is_complex():
        raise ValueError(
            f"singular values and eigenvalues of {columns} columns: up to {_COLUMNS}, and a fixed number, are exported"
        )
    unit = torch.eye(columns, dtype=matrix.dtype).expand(*matrix.shape[:-2], columns, columns)
    both = torch.cat([matrix, unit], dim=-2)
    pairs = (columns + 1) // 2
    if columns % 2:
        both = torch.nn.functional.pad(both, (0, 1))
    left, right = both[..., :pairs], both[..., pairs:]
    for _ in range(_SWEEPS * (2 * pairs - 1)):
        left, right = _turned(left, right, rows)
        left, right = _exchanged(left, right)
    both = torch.cat([left, right], dim=-1)[..., :columns]
    return both[..., :rows, :], both[..., rows:, :]


def _turned(left: Any, right: Any, rows: int) -> tuple[Any, Any]:
    """Columns turned with those beside them so that they are orthogonal; the last rows are only turned along."""
    first, second = left[..., :rows, :], right[..., :rows, :]
    a, b = (torch.sum(part * part, dim=-2, keepdim=True) for part in (first, second))
    product = torch.sum(first * second, dim=-2, keepdim=True)
    far = (b - a) / (2 * torch.where(product == 0, 1, product))
    sign = torch.where(far < 0, -1.0, 1.0)
    tangent = torch.where(product == 0, 0, sign / (torch.abs(far) + torch.sqrt(1 + far * far)))
    cosine = torch.rsqrt(1 + tangent * tangent)
    sine = cosine * tangent
    return cosine * left - sine * right, sine * left + cosine * right


def _exchanged(left: Any, right: Any) -> tuple[Any, Any]:
    """The next pairs: the first column stays, and the others move on by one place in a circle."""
    if left.shape[-1] == 1:
        return left, right
    moved = torch.cat([left[..., :1], right[..., :1], left[..., 1:-1]], dim=-1)
    return moved, torch.cat([right[..., 1:], left[..., -1:]], dim=-1)

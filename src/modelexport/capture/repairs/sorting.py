"""Operators that sort elements, or whose result depends on their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def stable(self: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """``TopK`` gives equal elements in their order."""
    return torch.sort(self, dim, descending)


def median(self: Any, dim: int = -1, keepdim: bool = False) -> Any:
    """The median along an axis; of an even number of elements the lower of the middle two."""
    return kth_value(self, (self.shape[dim] + 1) // 2, dim, keepdim)


def median_of_all(self: Any) -> Any:
    """The median of all elements."""
    return median(self.reshape(-1), 0)[0]


def kth_value(self: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """The k-th smallest element, counted from one."""
    place = torch.full((1,), k - 1)
    chosen = tuple(part.index_select(dim, place) for part in self.sort(dim))
    return chosen if keepdim else tuple(part.squeeze(dim) for part in chosen)


def median_of_numbers(self: Any) -> Any:
    """``nanmedian`` of all elements."""
    return median_of_numbers_along(self.reshape(-1), 0)[0]


def median_of_numbers_along(self: Any, dim: int, keepdim: bool = False) -> Any:
    """``nanmedian``: the lower of the middle two of those elements that are numbers."""
    missing = torch.isnan(self)
    ordered, order = torch.where(missing, float("inf"), self).sort(dim)
    count = (~missing).sum(dim, keepdim=True)
    middle = ((count - 1) // 2).clamp(min=0)
    values = torch.where(count == 0, float("nan"), ordered.gather(dim, middle))
    chosen = values, order.gather(dim, middle)
    return chosen if keepdim else tuple(part.squeeze(dim) for part in chosen)


def of_all(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """``amax`` and ``amin`` of all elements, for which torchlib lacks an axis."""

    def reduced(self: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
        return NotImplemented if dim or not self.dim() else reduce(self, list(range(self.dim())), keepdim)

    return reduced


def running(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """``cummax`` and ``cummin``: a square table of which elements lie before which, so that any length will do."""

    def running_extreme(self: Any, dim: int) -> Any:
        if not self.dim():
            return self.clone(), torch.zeros((), dtype=torch.long)
        elements = self.movedim(dim, -1)
        places = torch.arange(elements.shape[-1])
        before = places <= places.unsqueeze(1)
        # The first element, since the smallest number of a type may be among the elements.
        rows = torch.where(before, elements.unsqueeze(-2), elements[..., :1].unsqueeze(-2))
        extremes = reduce(rows, -1)
        same = (rows == extremes.unsqueeze(-1)) & before
        index = torch.where(same, places, 0).amax(-1)
        return extremes.movedim(-1, dim), index.movedim(-1, dim)

    return running_extreme


def search(
    sorted_sequence: Any,
    self: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """``searchsorted``: how many elements of a sequence are below, or up to, each value, or a number of Python."""
    if sorter is not None:
        sorted_sequence = sorted_sequence.gather(-1, sorter)
    row = sorted_sequence.unsqueeze(-2) if sorted_sequence.dim() > 1 else sorted_sequence
    value = self.unsqueeze(-1) if isinstance(self, torch.Tensor) else torch.full((1,), self)
    if row.dtype != value.dtype:
        row, value = row.double(), value.double()
    below = ~(row > value if right or side == "right" else row >= value)  # all are below NaN
    return below.sum(-1).to(torch.int32 if out_int32 else torch.long)


def bucket(self: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    """``bucketize`` of a number, with its arguments the other way round."""
    return search(boundaries, self, out_int32=out_int32, right=right)

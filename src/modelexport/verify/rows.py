"""The error of single rows of an array: the vectors along its last axis.

The norm of a whole array hides a row that is wrong among many that are right: an error of one row of n has 1/sqrt(n) of
its size there. Rounding errors are spread over all rows, so that a row is wrong only if it is several times as far off
as most are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod, sqrt
from typing import Any

import numpy as np

_LEAST = 16
"""The rounding errors of shorter rows spread nearly as widely as those of single elements, which have a tolerance of
their own: of the 2,304 rows of four of a convolution in GoogLeNet, one is off by 42 units."""


def errors_of_rows(apart: Any, right: Any, shape: Sequence[int]) -> Any:
    """The errors of the rows, each relative to its norm or to the typical row's, whichever is larger.

    Args:
        apart: The differences of the elements.
        right: The right elements, in the same order.
        shape: That of the array, which has rows.
    """
    errors, sizes = (np.sqrt((x[:, None] @ x[:, :, None]).reshape(-1)) for x in _rows(shape, apart, right))
    typical = sqrt(float(sizes @ sizes) / sizes.size)
    return errors / np.maximum(sizes, typical or 1.0)


def _rows(shape: Sequence[int], *arrays: Any) -> Iterator[Any]:
    return (array.reshape(-1, shape[-1]) for array in arrays)


def outlier(errors: Any, noise: Any = 0.0) -> float:
    """The largest of the errors of rows that is several times as large as most are; 0 if there is none.

    Args:
        noise: What each of them may be by rounding.
    """
    most = errors.max(initial=0.0)
    if 2 * np.count_nonzero(errors > most / _APART) > errors.size:  # as most often, and known without a median
        return 0.0
    wrong = errors[(errors > _APART * np.median(errors)) & (errors > noise)]
    return float(wrong.max(initial=0.0))


_APART = 8.0


def has_rows(shape: Sequence[int]) -> bool:
    """Whether an array has several rows of several elements."""
    return len(shape) > 1 and shape[-1] >= _LEAST and prod(shape[:-1]) > 1

"""The difference of two arrays as data: shape, type, NaN and infinities first, then how far the numbers are apart.

The error of an array is the norm of the difference over the norm of the right one, which does not change when
everything is scaled. Elements that are infinite, or a mask's substitute for that (1e30 or more), have to be so in both;
arrays that have no others are not compared (:func:`is_comparable`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from modelexport.traces.tolerances import ALLOWED, INFINITE

Verdict = Literal["agree", "tie", "differ", "not compared"]
"""``tie``: among equal scores the file chose other elements than PyTorch."""
EMPTY = "it has no elements"
SAID = {"agree": "agrees", "differ": "differs", "not compared": "not compared"}
"""The verdict on files, as it is written in a sentence."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of one array with the right one."""

    name: str
    status: Verdict
    reason: str = ""
    dtype: str = ""
    shape: list[int] = []
    absolute: float | None = None
    """The largest absolute difference of an element; infinite where only one of the two is a finite number."""
    relative: float | None = None
    """The norm of the difference over the norm of the right array."""
    allowed: float | None = None
    """The largest ``relative`` at which the arrays agree."""
    nans: int = 0
    """Elements that are NaN in only one of the two."""


def relative_error(right: np.ndarray, actual: np.ndarray) -> float:
    """The norm of the difference of two arrays over that of the right one; infinite if they cannot be compared.

    Integers and conditions are either equal (0) or not (1).
    """
    if right.shape != actual.shape:
        return float("inf")
    if not (is_floating(right) and is_floating(actual)):
        return 0.0 if np.array_equal(right, actual) else 1.0
    expected, actual_numbers = (array.astype(np.float64, copy=False).reshape(-1) for array in (right, actual))
    with np.errstate(all="ignore"):
        finite = np.abs(expected) < INFINITE
        if not (finite.all() and (np.abs(actual_numbers) < INFINITE).all()):
            if not _alike_where_not_finite(expected, actual_numbers):
                return float("inf")
            expected, actual_numbers = expected[finite], actual_numbers[finite]
        size, apart = float(np.linalg.norm(expected)), float(np.linalg.norm(expected - actual_numbers))
    return apart / size if size else (0.0 if not apart else float("inf"))


def _alike_where_not_finite(expected: np.ndarray, actual: np.ndarray) -> bool:
    """Whether two arrays have NaN, infinities and substitutes for these in the same places, with the same sign."""
    finite, actual_finite = np.abs(expected) < INFINITE, np.abs(actual) < INFINITE
    signed = ~actual_finite & ~np.isnan(actual) & ((expected > 0) == (actual > 0))
    return bool(np.where(finite, actual_finite, np.where(np.isnan(expected), np.isnan(actual), signed)).all())


def compare_arrays(
    name: str, right: np.ndarray, actual: np.ndarray, *, allowed: float | None = None, exact: np.ndarray | None = None
) -> Difference:
    """Compare two arrays; another shape or element type is a difference.

    Args:
        allowed: The error up to which they agree; by default that of the less exact type of the two.
        exact: The right array without rounding, to compare with instead; it has no type of its own.
    """
    if right.shape != actual.shape or right.dtype != actual.dtype:
        reason = f"expected {right.dtype}{list(right.shape)}, got {actual.dtype}{list(actual.shape)}"
        return Difference(name=name, status="differ", reason=reason, dtype=str(actual.dtype), shape=list(actual.shape))
    if exact is not None:
        right = exact
    facts: dict[str, Any] = {"name": name, "dtype": str(actual.dtype), "shape": list(actual.shape)}
    if not right.size:
        return Difference(**facts, status="not compared", reason=EMPTY)
    error = relative_error(right, actual)
    if not is_floating(actual):
        count = int(np.count_nonzero(right != actual)) if error else 0
        reason = f"{count:,} of {actual.size:,} elements differ" if count else ""
        return Difference(**facts, status="differ" if count else "agree", reason=reason, relative=error, absolute=error)
    allowed = ALLOWED.get(str(actual.dtype), 0.0) if allowed is None else allowed
    nans = int(np.count_nonzero(np.isnan(right.astype(np.float64)) != np.isnan(actual.astype(np.float64))))
    absolute = _largest(right, actual)
    status: Verdict = "differ" if not error <= allowed else "agree" if is_comparable(right) else "not compared"
    reason = "no element is a finite number" if status == "not compared" else ""
    if nans:
        reason = f"{nans:,} of {actual.size:,} elements are NaN in only one of the two"
    elif status == "differ":
        single = f"; a single element by {absolute:.1e}" if absolute is not None and absolute < float("inf") else ""
        reason = f"it is off by {error:.1e} of its size{single}"
    return Difference(
        **facts, status=status, reason=reason, absolute=absolute, relative=error, allowed=allowed, nans=nans
    )


def compare_outputs(
    names: Sequence[str], right: Sequence[np.ndarray], actual: Sequence[np.ndarray]
) -> list[Difference]:
    """Compare arrays by position; one that only one side has is a difference, unless it has no elements."""
    differences = []
    for i in range(max(len(right), len(actual))):
        name = names[i] if i < len(names) else f"output {i}"
        if i < len(right) and i < len(actual):
            differences.append(compare_arrays(name, right[i], actual[i]))
        elif i < len(actual) or right[i].size:  # exporters leave out what is empty
            side = "PyTorch" if i >= len(right) else "the file"
            differences.append(Difference(name=name, status="differ", reason=f"{side} has no such output"))
    return differences


def worst(differences: Sequence[Difference]) -> Difference | None:
    """The largest difference; ``None`` if there are none."""
    order = ("agree", "tie", "not compared", "differ")
    return max(
        differences, key=lambda difference: (order.index(difference.status), difference.relative or 0.0), default=None
    )


def verdict_of(statuses: Collection[str | None]) -> Verdict:
    """``differ`` if anything does, ``not compared`` if nothing was, else ``agree``."""
    return "differ" if "differ" in statuses else "agree" if "agree" in statuses else "not compared"


def is_comparable(right: np.ndarray) -> bool:
    """Whether equality with an array is evidence: no element, NaN and infinity say nothing about what computed them."""
    if not is_floating(right):
        return bool(right.size)
    with np.errstate(invalid="ignore"):
        return bool((np.abs(right.astype(np.float64, copy=False)) < INFINITE).any())


def is_floating(array: np.ndarray) -> bool:
    """Whether an array has floating-point numbers: NumPy knows bfloat16 by name only."""
    return bool(array.dtype.kind == "f" or array.dtype.name == "bfloat16")


def _largest(right: np.ndarray, actual: np.ndarray) -> float | None:
    first, second = right.astype(np.float64), actual.astype(np.float64)
    if not _alike_where_not_finite(first, second):
        return float("inf")
    finite = np.abs(first) < INFINITE
    return float(np.max(np.abs(first[finite] - second[finite]))) if finite.any() else None

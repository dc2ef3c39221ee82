"""Two computations of the same value, compared: shape, element type and NaN before differences. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

TOLERANCES = {"float64": (1e-7, 1e-6), "float32": (1e-4, 1e-3), "float16": (1e-2, 1e-2), "bfloat16": (5e-2, 5e-2)}
"""Element type to the absolute and the relative difference of which one at least must hold; other types are equal."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One value computed twice."""

    name: str
    status: str
    """``agree``, ``differ``, or ``not comparable``."""
    reason: str = ""
    dtype: str = ""
    shape: list[int] = []
    absolute: float | None = None
    """The largest absolute difference over the elements that are a number in both."""
    relative: float | None = None
    """The largest difference relative to the expected element."""
    nans: int = 0
    """How many elements are NaN in one and not in the other."""


def compare_outputs(names: Sequence[str], expected: Sequence[Any], actual: Sequence[Any]) -> list[Difference]:
    """Compare two runs value by value; a value that only one of them has is not comparable."""
    differences = [compare_arrays(name, a, b) for name, a, b in zip(names, expected, actual, strict=False)]
    if len(expected) != len(actual):
        reason = f"PyTorch returns {len(expected)} tensors and the file {len(actual)}"
        differences += [
            Difference(name=name, status="not comparable", reason=reason)
            for name in (names[len(expected) :] or [f"output {i}" for i in range(len(actual), len(expected))])
        ]
    return differences


def compare_arrays(name: str, expected: Any, actual: Any, *, limits: tuple[float, float] | None = None) -> Difference:
    """Compare a value with what it should be.

    Args:
        expected: An array.
        actual: An array; another shape or element type makes it not comparable.
        limits: The absolute and the relative difference that are allowed, in place of its type's ``TOLERANCES``.
    """
    dtype, shape = str(actual.dtype), list(actual.shape)
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        reason = f"expected {expected.dtype}{list(expected.shape)}, got {dtype}{shape}"
        return Difference(name=name, status="not comparable", reason=reason, dtype=dtype, shape=shape)
    if dtype not in TOLERANCES:
        wrong = int(np.count_nonzero(expected != actual))
        return Difference(
            name=name,
            status="differ" if wrong else "agree",
            reason=f"{wrong} of {expected.size} elements differ" if wrong else "",
            dtype=dtype,
            shape=shape,
            absolute=float(np.max(np.abs(expected.astype(np.float64) - actual), initial=0.0)),
        )
    one, two = expected.astype(np.float64), actual.astype(np.float64)
    nans = int(np.count_nonzero(np.isnan(one) != np.isnan(two)))
    same = (one == two) | (np.isnan(one) & np.isnan(two))
    with np.errstate(invalid="ignore"):
        absolute = np.where(same, 0.0, np.abs(one - two))
    with np.errstate(over="ignore"):
        relative = absolute / np.maximum(np.abs(one), np.finfo(np.float64).tiny)
    limit, relative_limit = limits or TOLERANCES[dtype]
    wrong = int(np.count_nonzero(~((absolute <= limit) | (relative <= relative_limit))))
    return Difference(
        name=name,
        status="differ" if wrong else "agree",
        reason=f"{wrong} of {one.size} elements differ" if wrong else "",
        dtype=dtype,
        shape=shape,
        absolute=_largest(absolute),
        relative=_largest(relative),
        nans=nans,
    )


def _largest(differences: Any) -> float:
    return float(np.max(differences[~np.isnan(differences)], initial=0.0))


def worst(differences: Sequence[Difference]) -> Difference | None:
    """The one to show for many: one that differs, else one that cannot be compared, else the largest difference."""
    order = {"differ": 2, "not comparable": 1, "agree": 0}
    return max(differences, key=lambda one: (order[one.status], one.absolute or 0.0), default=None)

"""The difference of an array from the expected one, relative to its norm and the rounding of its type.

The error of a tensor is a ratio of norms, ``|found - right| / |right|``, which does not change when everything is
scaled. The tolerance is a multiple of rounding noise:

- *unit*: the unit roundoff of the element type, half the distance between 1 and the next number (N. Higham,
  "Accuracy and Stability of Numerical Algorithms", 2.1). Two ways to compute one thing differ by a few of them.
- *measured*: the difference between PyTorch's run and the same run in float64, which is the effect of rounding.

Elements ten thousand times larger than the others and above a thousand (added by a mask) are a separate group: they
would hide the rest. Where most elements nearly vanish instead (a gate that is closed), they are rounded as the others.
Numbers below the smallest normal one of a type have few digits, or are zero in some kernels: so much is rounding, too.
A norm hides a wrong element among a million, so that no element may be off by many times the tolerance of the norm,
relative to itself or to the typical element: rounding errors are spread over all elements. A value that was computed
from the right ones before it must not have a wrong row, either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod, sqrt
from typing import Any, Literal

import msgspec
import numpy as np

from modelexport.verify.rows import errors_of_rows, has_rows, outlier

Verdict = Literal["agree", "tie", "differ", "not compared"]
"""``tie``: it selected other elements of equal value than PyTorch, whose selection was then fed to the next segment."""

UNITS: Mapping[str, float] = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The unit roundoff of each floating-point type."""
VANISHING: Mapping[str, float] = {
    "float64": 2.0**-1022,
    "float32": 2.0**-126,
    "float16": 2.0**-24,
    "bfloat16": 2.0**-126,
}
"""What an element of each type may be off by, whatever its size: below that, kernels may make it zero."""
ALLOWED_UNITS = 32.0
"""The error in units up to which a tensor agrees without measuring its noise; of ``bfloat16`` :data:`_FEW` is less."""
_FEW = 1 / 64
"""The share of its size that a tensor may be off by without measuring its noise."""
_MOST = 1 / 8
"""The share that it may be off by if its noise cannot be measured, whatever that many units are."""
ALLOWED_NOISE = 8.0
"""The error in multiples of the measured noise up to which it agrees: the runtime sums in another order."""
UNMEASURED_UNITS = 64.0
"""The error in units up to which it agrees if the noise exceeds a few units and cannot be measured."""
SHARES: Mapping[str, float] = {"float64": 1e-6, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""The share of the size of a model's outputs that rounding mostly stays far below."""
ALLOWED_OF_ONE = 32.0
"""How many times the tolerance of the norm a single element may be off by."""
_APART = 1e4
_MASK = 1e3
_INFINITE = 1e30


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of one value with the expected one."""

    name: str
    status: Verdict
    reason: str = ""
    dtype: str = ""
    shape: list[int] = []
    absolute: float | None = None
    """The largest absolute difference of an element."""
    relative: float | None = None
    """The norm of the difference divided by the norm of the right value, for the worse group of elements."""
    of_one: float | None = None
    """The largest error of an element, relative to itself or to the root mean square of all, whichever is larger."""
    of_row: float | None = None
    """The error of a row that is off by more than the others, relative to itself or to the typical row."""
    noise: float | None = None
    """The rounding noise in the same measure: measured, or the unit of the type."""
    measured: bool = False
    """Whether the noise was measured for this value."""
    nans: int = 0
    """Elements that are NaN in only one of the two."""
    nans_in_file: int = 0
    """Those of them that are not NaN in the right value."""

    @property
    def multiple(self) -> float | None:
        """The error in multiples of the noise."""
        return None if self.relative is None or not self.noise else self.relative / self.noise

    @property
    def is_doubtful(self) -> bool:
        """Whether it agrees only with more noise than rounding mostly makes: float64 may give something else."""
        return self.status == "agree" and self.measured and (self.noise or 0.0) > SHARES[self.dtype]


def known_beside_noise(difference: Difference) -> Difference:
    """A comparison; not one if it agrees with so much measured noise that nearly everything would."""
    noise, error = difference.noise or 0.0, difference.relative or 0.0
    if difference.status != "agree" or not difference.measured or noise <= _DROWNED:
        return difference
    if error <= unmeasured_share(difference.dtype):
        return difference
    reason = f"rounding alone changes it by {noise:.0%} of its size in PyTorch, too much to tell a fault"
    return msgspec.structs.replace(difference, status="not compared", reason=reason)


_DROWNED = 1 / 16
"""The noise, as a share of a value's size, of which the multiple that is allowed is half of that size."""


def unmeasured_share(dtype: str) -> float:
    """The share of its size that a value of a floating-point type may be off by without measuring its noise."""
    return min(ALLOWED_UNITS * UNITS[dtype], _FEW)


def is_rounding(right: Any, found: Any, exact: Any | None) -> bool:
    """Whether a value is off by no more than a few times what rounding makes of it: of ``log(1 - p)`` with a
    probability of nearly one there is little else.

    Args:
        exact: The same value computed with less rounding.
    """
    if exact is None or exact.shape != found.shape or found.dtype.kind != "f" or not np.isfinite(found).all():
        return False
    error, noise = (float(np.linalg.norm((one.astype(np.float64) - found).ravel())) for one in (right, exact))
    return error <= ALLOWED_NOISE * noise


def compare_outputs(
    names: Sequence[str],
    expected: Sequence[Any],
    actual: Sequence[Any],
    exact: Sequence[Any | None] = (),
    units: float | Mapping[str, float] | None = None,
) -> list[Difference]:
    """Compare arrays by position; an array that only one side has is reported, unless it has no elements.

    Args:
        names: The names of ``actual``.
        exact: The values of ``expected`` without rounding, where known.
        units: As in :func:`compare_arrays`; by element type if they differ.
    """
    found = []
    for i in range(max(len(expected), len(actual))):
        name = names[i] if i < len(names) else f"output {i}"
        if i >= len(expected) or i >= len(actual):
            if i < len(expected) and np.asarray(expected[i]).size == 0:
                continue  # the exporter omits empty outputs
            side = "PyTorch" if i >= len(expected) else "the file"
            found.append(Difference(name=name, status="differ", reason=f"{side} has no such output"))
        else:
            known = exact[i] if i < len(exact) else None
            its = units.get(str(actual[i].dtype)) if isinstance(units, Mapping) else units
            found.append(compare_arrays(name, expected[i], actual[i], exact=known, units=its))
    return found


def compare_arrays(
    name: str,
    expected: Any,
    actual: Any,
    *,
    exact: Any | None = None,
    units: float | None = None,
    by_row: bool = False,
) -> Difference:
    """Compare two arrays; another shape or element type is a difference.

    Args:
        exact: ``expected`` without rounding, in float64, to measure the noise.
        units: Units of roundoff that are always allowed, independent of the noise; by default few. Narrow types have
            less than that many.
        by_row: Whether no row may be wrong either.
    """
    dtype, shape = str(actual.dtype), list(actual.shape)
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        reason = f"expected {expected.dtype}{list(expected.shape)}, got {dtype}{shape}"
        return Difference(name=name, status="differ", reason=reason, dtype=dtype, shape=shape)
    if dtype not in UNITS:
        wrong = int(np.count_nonzero(expected != actual))
        return Difference(
            name=name,
            status="differ" if wrong else "agree",
            reason=f"{wrong} of {expected.size} elements differ" if wrong else "",
            dtype=dtype,
            shape=shape,
            absolute=float(np.max(np.abs(expected.astype(np.float64) - actual), initial=0.0)),
        )
    unit = UNITS[dtype]
    allowed = unmeasured_share(dtype) / unit if units is None else min(units, _MOST / unit)
    return _compare_numbers(name, expected, actual, exact, unit, allowed, by_row)


def _agreeing(name: str, expected: Any, actual: Any, unit: float, units: float, by_row: bool) -> Difference | None:
    """The comparison of arrays of ordinary numbers that agree, which is most often so; ``None`` where it has to be done
    with more care."""
    one, two = expected.reshape(-1), actual.reshape(-1)
    absolute, sums = 0.0, [0.0, 0.0]
    with np.errstate(invalid="ignore", over="ignore"):
        apart = two - one
        for a, b in blocks(one, apart):
            squares = float(a.dot(a)), float(b.dot(b))
            if not (squares[0] < _PLAIN[1] ** 2 and squares[1] < _PLAIN[1] ** 2):  # not a number compares as false
                return None
            sums = [sums[0] + squares[0], sums[1] + squares[1]]
            absolute = max(absolute, float(b.max()), -float(b.min()))
    size, error = map(sqrt, sums)
    if not 2 * _PLAIN[0] * sqrt(one.size) < size < _MASK / 2:  # or else the largest is above the least, and no mask
        largest = max(float(one.max(initial=0.0)), -float(one.min(initial=0.0)))
        if largest <= _PLAIN[0] or (largest > _MASK and largest > _APART / 10 * _middle(one)):
            return None
    if error > units * unit * size:
        return None
    typical = size / sqrt(max(expected.size, 1))
    of_one = absolute / typical
    if of_one > ALLOWED_OF_ONE * ALLOWED_UNITS * unit:
        of_one = _of_one(np.abs(apart), np.abs(one), typical)
    if of_one > ALLOWED_OF_ONE * units * unit:
        return None
    of_row = None
    if _may_hide_a_row(expected.shape, error / size, of_one, unit):
        of_row = outlier(errors_of_rows(apart, one, expected.shape)) or None
    if by_row and (of_row or 0.0) > units * unit:
        return None
    return Difference(
        name=name,
        status="agree",
        dtype=str(actual.dtype),
        shape=list(actual.shape),
        absolute=absolute,
        relative=error / size,
        of_one=of_one,
        of_row=of_row,
        noise=unit,
    )


def _middle(values: Any) -> float:
    """About the median of the sizes of some numbers."""
    sample = np.abs(values[:: max(values.size // 4096, 1)])
    return float(np.partition(sample, sample.size // 2)[sample.size // 2])


def _may_hide_a_row(shape: Sequence[int], relative: float, of_one: float, unit: float) -> bool:
    """Whether a row may be off by too much: by no more than its worst element or the typical one, and than all rows."""
    least = ALLOWED_UNITS * unit
    return has_rows(shape) and sqrt(2) * of_one > least and relative * sqrt(prod(shape[:-1])) > least


def blocks(*arrays: Any) -> Iterator[tuple[Any, ...]]:
    """Flat arrays of one size in parts, so that what is made of them on the way stays in the processor's cache."""
    for begin in range(0, arrays[0].size, _BLOCK):
        yield tuple(array[begin : begin + _BLOCK] for array in arrays)


_BLOCK = 1 << 16


def _of_one(apart: Any, sizes: Any, typical: float) -> float:
    """The largest of some errors, relative to their elements or to the typical one."""
    return float((apart / np.maximum(sizes, typical or 1.0)).max(initial=0.0))


_PLAIN = (1e-12, 1e12)
"""Between these, squares of float32 numbers neither vanish nor overflow."""


def _compare_numbers(
    name: str, expected: Any, actual: Any, exact: Any | None, unit: float, units: float, by_row: bool
) -> Difference:
    if exact is None and actual.dtype in (np.float32, np.float64):
        quick = _agreeing(name, expected, actual, unit, units, by_row)
        if quick is not None:
            return quick
    one, two = expected.astype(np.float64).reshape(-1), actual.astype(np.float64).reshape(-1)
    nans, infinite, finite = unequal_infinities(one, two)
    one, two = one[finite], two[finite]
    right = exact.astype(np.float64).reshape(-1)[finite] if exact is not None and exact.size == expected.size else None
    if right is not None:
        right = np.where(np.isfinite(right), right, one)  # what overflows otherwise is not noise
    relative, noise, of_one, largest, wrong = 0.0, unit, 0.0, 0.0, infinite > 0
    least = VANISHING[str(actual.dtype)]
    two = np.where(np.abs(two - one) <= least, one, two)
    groups = _groups(one)
    for group in groups:
        error, size = _norm(two[group] - one[group]), _norm(one[group])
        own = _norm(one[group] - right[group]) if right is not None else 0.0
        allowed = max(units * unit * size, ALLOWED_NOISE * own)
        single, its = _errors_of_one(one[group], two[group], right[group] if right is not None else None)
        wrong, largest = wrong or error > allowed, max(largest, single)
        if single > max(ALLOWED_OF_ONE * units * unit, ALLOWED_OF_ONE * ALLOWED_NOISE * its):
            wrong, of_one = True, max(of_one, single)
        share = error / size if size else np.inf if error else 0.0
        if share >= relative:
            relative, noise = share, max(own / size if size else 0.0, unit)
    of_row = None
    if len(groups) == 1 and one.size == expected.size and _may_hide_a_row(expected.shape, relative, largest, unit):
        errors = errors_of_rows(two - one, one, expected.shape)
        own = errors_of_rows(one - right, one, expected.shape) if right is not None else np.zeros_like(errors)
        of_row = outlier(errors, ALLOWED_NOISE * np.maximum(own, noise)) or None
        wrong = wrong or (by_row and (of_row or 0.0) > units * unit)
    differing = np.count_nonzero(np.abs(one - two) > units * unit * np.abs(one))
    reason = ""
    if wrong:
        reason = f"{differing + infinite:,} of {expected.size:,} elements differ, by {relative:.1e} of its size"
        reason += f", {relative / noise:,.0f} times the rounding noise" if np.isfinite(relative) else ""
        reason += f"; a single one by {of_one:.1e}" if of_one else f"; a row by {of_row:.1e}" if of_row else ""
    return Difference(
        name=name,
        status="differ" if wrong else "agree",
        reason=reason,
        dtype=str(actual.dtype),
        shape=list(actual.shape),
        absolute=float(np.max(np.abs(one - two), initial=0.0)),
        relative=float(relative),
        of_one=of_one or None,
        of_row=of_row,
        noise=float(noise),
        measured=right is not None,
        nans=nans,
        nans_in_file=int(np.count_nonzero(np.isnan(actual) & ~np.isnan(expected))) if nans else 0,
    )


def unequal_infinities(one: Any, two: Any) -> tuple[int, int, Any]:
    """The number of elements that are NaN in one array only, of those that are infinite so, and the finite ones."""
    unbounded, other = ~(np.abs(one) < _INFINITE), ~(np.abs(two) < _INFINITE)
    if not unbounded.any() and not other.any():
        return 0, 0, slice(None)
    with np.errstate(invalid="ignore"):
        same = (one == two) | (np.isnan(one) & np.isnan(two)) | (np.sign(one) == np.sign(two))
    infinite = int(np.count_nonzero((unbounded != other) | (unbounded & ~same)))
    return int(np.count_nonzero(np.isnan(one) != np.isnan(two))), infinite, ~unbounded & ~other


def _errors_of_one(one: Any, two: Any, right: Any | None) -> tuple[float, float]:
    """The largest error of an element, and of its rounding, if that was measured."""
    sizes = np.abs(one)
    typical = _norm(one) / sqrt(max(one.size, 1))
    its = _of_one(np.abs(one - right), sizes, typical) if right is not None else 0.0
    return _of_one(np.abs(two - one), sizes, typical), its


def _groups(values: Any) -> list[Any]:
    """The elements of ordinary size, and those far above, as a mask makes them, if there are both."""
    sizes = np.abs(values)
    if not sizes.max(initial=0.0) > _MASK:
        return [slice(None)]
    typical = float(np.median(sizes[sizes > 0]))
    large = sizes > max(_APART * typical, _MASK)
    return [~large, large] if np.any(large) else [slice(None)]


def _norm(values: Any) -> float:
    return float(np.linalg.norm(values))


def worst(differences: Sequence[Difference]) -> Difference | None:
    """The worst of several: one that differs, or else the one with the largest error in multiples of noise."""
    order = {"differ": 3, "not compared": 2, "tie": 1, "agree": 0}
    return max(differences, key=lambda one: (order[one.status], one.multiple or 0.0, one.absolute or 0.0), default=None)

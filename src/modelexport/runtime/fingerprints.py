"""Fingerprints of arrays: a few numbers to find equal contents among thousands of arrays, independent of shape."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T", bound=Hashable)

NEAR = 2e-4
"""The largest distance of two fingerprints of one content, in norms: above the rounding of a whole model."""
_HUGE = 1e18
"""Numbers of this size or above are a mask's substitute for infinity: they are counted, not measured."""
_SMALL = 1e-12
"""The norm below which sums are made in float64."""
_FIRST = 64
_LOOK = 4096
_KEPT = 32


class Fingerprint(NamedTuple):
    """The fingerprint of a flattened array."""

    kind: str
    """``f`` for floating-point numbers of any width, else the element type."""
    size: int
    norm: float
    """The root mean square of the elements."""
    one: float
    two: float
    """Projections on two fixed random directions, in the units of the norm."""
    telling: bool
    """Whether the content is distinctive: unrelated arrays rarely share more than a few distinct numbers."""

    def same(self, other: Fingerprint) -> bool:
        """Whether both are of identical numbers, up to the rounding of sums, which depends on the memory layout."""
        return self.near(other, 1e-6)

    def near(self, other: Fingerprint, apart: float = NEAR) -> bool:
        """Whether both may be fingerprints of the same content."""
        room = apart * max(self.norm, other.norm)
        return (self.kind, self.size) == (other.kind, other.size) and (
            abs(self.norm - other.norm) <= room
            and abs(self.one - other.one) <= 4 * room
            and abs(self.two - other.two) <= 4 * room
        )


class _Directions:
    """Random directions of any length: prefixes of one long random vector."""

    def __init__(self) -> None:
        self._numbers = np.empty(0, dtype=np.float32)

        self._backwards: dict[int, Any] = {}

    def __call__(self, size: int) -> Any:
        if self._numbers.size < size:
            self._numbers = np.random.default_rng(12).standard_normal(max(size, 1 << 16), dtype=np.float32)
            self._backwards.clear()
        return self._numbers[:size]

    def backwards(self, size: int) -> Any:
        """The direction of a size from its end, laid out one by one: a product with it is several times as fast."""
        if size not in self._backwards:
            if len(self._backwards) >= _KEPT:
                self._backwards.clear()
            self._backwards[size] = np.ascontiguousarray(self(size)[::-1])
        return self._backwards[size]


_directions = _Directions()


def is_floating(array: Any) -> bool:
    """Whether an array has floating-point numbers: NumPy knows bfloat16 by name only."""
    return bool(array.dtype.kind == "f" or array.dtype.name == "bfloat16")


def fingerprint_of(array: Any) -> Fingerprint:
    """The fingerprint of an array of any type and shape."""
    kind = "f" if is_floating(array) else str(array.dtype)
    flat = np.ascontiguousarray(array).reshape(-1).astype(np.float32, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        norm = sqrt(float(flat.dot(flat)))
    if not norm < _HUGE:  # some of them may be, or be no numbers: comparisons with NaN are false
        flat = np.where(np.abs(flat) < _HUGE, flat, np.float32(0))
        norm = float(np.linalg.norm(flat))
    if (norm < _SMALL and norm > 0) or (norm == 0 and flat.any()):  # the squares of its elements vanish
        flat = flat.astype(np.float64)
        norm = float(np.linalg.norm(flat))
    direction = _directions(flat.size)
    scale = sqrt(max(flat.size, 1))
    telling = kind == "f" and has_several(flat)
    return Fingerprint(
        kind,
        flat.size,
        norm / scale,
        float(direction.dot(flat)) / scale,
        float(_directions.backwards(flat.size).dot(flat)) / scale,
        telling,
    )


def has_several(flat: Any) -> bool:
    """Whether an array has more than three different numbers near its beginning."""
    return flat.size >= _SEVERAL and (_several(flat[:_FIRST]) or _several(flat[:_LOOK]))


_SEVERAL = 4


def _several(numbers: Any) -> bool:
    count = len(set(numbers.tolist())) if numbers.size <= _FIRST else np.unique(numbers).size
    return bool(count >= _SEVERAL)


@dataclass
class Index(Generic[T]):
    """An index of items by the fingerprints of their contents."""

    _rows: dict[tuple[str, int], list[tuple[Fingerprint, T]]] = field(default_factory=lambda: defaultdict(list))
    _sorted: dict[tuple[str, int], tuple[list[float], list[int]]] = field(default_factory=dict)
    """The first projections in ascending order, and whose they are: normalized tensors all have one norm."""

    def add(self, fingerprint: Fingerprint, thing: T) -> None:
        """Add an item."""
        place = (fingerprint.kind, fingerprint.size)
        self._rows[place].append((fingerprint, thing))
        self._sorted.pop(place, None)

    def near(self, fingerprint: Fingerprint, apart: float = NEAR) -> Iterator[T]:
        """The items whose content may have this fingerprint, in the order in which they were added.

        Args:
            apart: The largest distance in norms, less than 1.
        """
        place = (fingerprint.kind, fingerprint.size)
        rows = self._rows.get(place)
        if not rows:
            return
        if place not in self._sorted:
            order = sorted(range(len(rows)), key=lambda index: rows[index][0].one)
            self._sorted[place] = [rows[index][0].one for index in order], order
        ones, order = self._sorted[place]
        most = 4 * apart * fingerprint.norm / (1 - apart)  # a near one has no larger norm than that
        room = most + _ROUNDING * (most + abs(fingerprint.one))
        begin, end = bisect_left(ones, fingerprint.one - room), bisect_right(ones, fingerprint.one + room)
        for index in sorted(order[begin:end]):
            if fingerprint.near(rows[index][0], apart):
                yield rows[index][1]


_ROUNDING = 1e-9
"""More than the rounding of what is compared with projections."""

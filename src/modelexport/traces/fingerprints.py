"""Fingerprints: a few sums of an array, by which equal arrays are found among thousands in a dictionary's time.

Two runs in float64 agree to about 1e-15 of a value's size, and arrays that are not equal almost never agree in all the
sums. Some of the sums do not depend on the order of the elements, so that an array is also found in another layout.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from modelexport.traces.tolerances import EQUAL_IN_FLOAT64, INFINITE, PROJECTION_DEVIATIONS

_PROJECTIONS = 4
_BLOCK = 1 << 16


class Fingerprint(NamedTuple):
    """The fingerprint of an array of any type; sizes are relative to the root mean square of the finite elements."""

    size: int
    """The number of elements."""
    special: tuple[int, int, int]
    """How many of them are infinite, minus infinite and NaN."""
    norm: float
    """The root mean square of the finite elements."""
    mean: float
    least: float
    most: float
    projections: tuple[float, ...]
    """Products with fixed random vectors, divided by the root of the size: they depend on the order."""
    telling: bool
    """Whether the elements are not all whole numbers: those are in many unrelated arrays."""

    def equal_in_order(self, other: Fingerprint, allowed_error: float = EQUAL_IN_FLOAT64) -> bool:
        """Whether both are of equal elements in the same order.

        Args:
            allowed_error: The difference that is allowed, as a share of the size.
        """
        return self.equal_in_any_order(other, allowed_error) and all(
            abs(a - b) <= PROJECTION_DEVIATIONS * allowed_error * max(self.norm, other.norm)
            for a, b in zip(self.projections, other.projections, strict=True)
        )

    def equal_in_any_order(self, other: Fingerprint, allowed_error: float = EQUAL_IN_FLOAT64) -> bool:
        """Whether both are of equal elements in any order."""
        allowed = allowed_error * max(self.norm, other.norm)
        return (
            (self.size, self.special) == (other.size, other.special)
            and abs(self.norm - other.norm) <= allowed
            and abs(self.mean - other.mean) <= allowed
            and abs(self.least - other.least) <= allowed * self._root
            and abs(self.most - other.most) <= allowed * self._root
        )

    def distance(self, other: Fingerprint) -> float:
        """An estimate of the root mean square of the difference of two arrays of one size."""
        if self.special != other.special:
            return float("inf")
        return float(np.sqrt(np.mean(np.square(np.subtract(self.projections, other.projections)))))

    @property
    def _root(self) -> float:
        return float(self.size**0.5)


def fingerprint_of(array: np.ndarray) -> Fingerprint:
    """The fingerprint of an array."""
    flat = np.ascontiguousarray(array).reshape(-1)
    whole = flat.dtype.kind in "biu"
    flat = flat.astype(np.float64, copy=False)
    if not flat.size:
        return Fingerprint(0, (0, 0, 0), 0.0, 0.0, 0.0, 0.0, (0.0,) * _PROJECTIONS, telling=False)
    least, most = float(flat.min()), float(flat.max())
    special = (0, 0, 0)
    if not (least > -INFINITE and most < INFINITE):  # NaN, too
        above, below, nan = flat >= INFINITE, flat <= -INFINITE, np.isnan(flat)
        special = (int(above.sum()), int(below.sum()), int(nan.sum()))
        flat = np.where(above | below | nan, 0.0, flat)
        least, most = float(flat.min()), float(flat.max())
    root = flat.size**0.5
    projections = tuple(float(projection) / root for projection in _projected(flat))
    norm = float(np.linalg.norm(flat)) / root
    telling = not whole and bool((flat[:_BLOCK] != np.rint(flat[:_BLOCK])).any())
    return Fingerprint(flat.size, special, norm, float(flat.mean()), least, most, projections, telling)


def _projected(flat: np.ndarray) -> np.ndarray:
    """Products with fixed random vectors: one random block, repeated with a random factor each."""
    whole, rest = divmod(flat.size, _BLOCK)
    products: np.ndarray = _vectors[:, :rest] @ flat[whole * _BLOCK :]
    if whole:
        factors = np.random.default_rng(12).standard_normal((_PROJECTIONS, whole))
        products = products + ((_vectors @ flat[: whole * _BLOCK].reshape(whole, _BLOCK).T) * factors).sum(axis=1)
    return products


_vectors = np.random.default_rng(12).standard_normal((_PROJECTIONS, _BLOCK))

"""The range, or the multiples, of a size from a few sizes with which something is so, and some with which it is not."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping


def bounds_of(alike: Mapping[int, bool], size: int, is_alike: Callable[[int], bool]) -> str:
    """The formula, with ``{0}`` for the symbol, of the sizes at which something is as it is with one.

    Args:
        alike: Sizes that were tried, to whether it is so with them.
        size: One with which it is so.
        is_alike: Tries one more.
    """
    right, wrong = [n for n in alike if alike[n]], [n for n in alike if not alike[n]]
    for period in range(2, _LONGEST_PERIOD):
        if len(right) > 1 and all((n % period == size % period) == same for n, same in alike.items()):
            return f"{{0}} % {period} == {size % period}"
    low = max((n for n in wrong if n < size), default=0)
    high = min((n for n in wrong if n > size), default=0)
    first, last = min(n for n in right if n > low), max(n for n in right if not high or n < high)
    if high:
        last += bisect_left(range(last + 1, high), True, key=lambda n: not is_alike(n))
    if low:
        first = low + 1 + bisect_left(range(low + 1, first), True, key=is_alike)
    below, above = f"{{0}} <= {last}" if high else "", f"{{0}} >= {first}" if low else ""
    return f"{first} <= {{0}} <= {last}" if below and above else below or above


_LONGEST_PERIOD = 33

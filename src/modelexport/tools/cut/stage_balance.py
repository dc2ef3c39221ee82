"""Cutting a sequence into balanced stages with the least traffic across the cuts. Works on numbers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

SLACK = 0.1
"""How much larger than the smallest possible the largest stage may be to reduce the traffic across the cuts."""


@dataclass(frozen=True)
class Units:
    """The indivisible units of a sequence, in order: the items of each and the cost of a cut before it.

    A stage's size is the sum over the *distinct* items of its units: a weight that two of them use is counted once.
    """

    items: Sequence[Mapping[Hashable, int]]
    """For each unit its items and their sizes."""
    crossing: Sequence[int]
    """The cost of a cut before each unit; that of the first is ignored."""

    def size(self, start: int, end: int) -> int:
        """The size of the stage of the units from ``start`` up to ``end``."""
        return sum({item: size for unit in self.items[start:end] for item, size in unit.items()}.values())

    def sizes(self, cuts: Sequence[int]) -> list[int]:
        """The sizes of all stages."""
        ends = [0, *cuts, len(self.items)]
        return [self.size(start, end) for start, end in pairwise(ends)]


def best_limit(units: Units, stages: int) -> int:
    """The smallest possible size of the largest of ``stages`` stages."""
    low, high = max(units.size(i, i + 1) for i in range(len(units.items))), units.size(0, len(units.items))
    while low < high:
        middle = (low + high) // 2
        if fewest_stages(units, middle) <= stages:
            high = middle
        else:
            low = middle + 1
    return low


def fewest_stages(units: Units, limit: int) -> int:
    """The smallest number of stages of at most ``limit``, which no single unit may exceed."""
    stages, total = 1, 0
    here: set[Hashable] = set()
    for unit in units.items:
        total += sum(size for item, size in unit.items() if item not in here)
        here.update(unit)
        if total > limit:
            stages += 1
            total, here = sum(unit.values()), set(unit)
    return stages


def balanced_cuts(units: Units, stages: int, limit: int) -> list[int]:
    """The units before which to cut, so that no stage exceeds ``limit`` and the cost of the cuts is smallest.

    Among cuts of equal cost, neighboring stages are made as equal as possible.

    Raises:
        ValueError: No such cuts exist.
    """
    lowest, count = _lowest_starts(units, limit), len(units.items)
    costs: list[float] = [0.0] + [float("inf")] * count
    """The smallest cost of the cuts up to each end of the last stage so far."""
    starts: list[list[int]] = []
    for stage in range(1, stages + 1):
        before, costs = costs, [float("inf")] * (count + 1)
        starts.append([0] * (count + 1))
        for end in range(1, count) if stage < stages else [count]:
            if within := before[lowest[end] : end]:
                costs[end] = min(within) + (units.crossing[end] if stage < stages else 0)
                starts[-1][end] = lowest[end] + within.index(min(within))
    if costs[-1] == float("inf"):
        raise ValueError(f"no {stages} stages of {count} units are within {limit}")
    cuts = [count]
    for start in reversed(starts):
        cuts.append(start[cuts[-1]])
    return _evened(units, cuts[-2:0:-1])


def _lowest_starts(units: Units, limit: int) -> list[int]:
    """For each end of a stage, the first unit at which it may begin without exceeding the limit; never decreases."""
    lowest, start, total = [0], 0, 0
    here: Counter[Hashable] = Counter()
    for unit in units.items:
        total += sum(size for item, size in unit.items() if not here[item])
        here.update(unit.keys())
        while total > limit:
            left = units.items[start]
            here.subtract(left.keys())
            total -= sum(size for item, size in left.items() if not here[item])
            start += 1
        lowest.append(start)
    return lowest


def _evened(units: Units, cuts: list[int]) -> list[int]:
    """Move each cut between its neighbors to where its two stages are most equal, without increasing its cost."""
    for _ in range(2 * len(cuts)):
        before = list(cuts)
        for index, cut in enumerate(cuts):
            start = cuts[index - 1] if index else 0
            end = cuts[index + 1] if index + 1 < len(cuts) else len(units.items)
            left, right = _running(units, range(start, end)), _running(units, range(end - 1, start - 1, -1))[::-1]
            places = [place for place in range(start + 1, end) if units.crossing[place] <= units.crossing[cut]]
            cuts[index] = min(places, key=lambda p: (max(left[p - start - 1], right[p - start]), units.crossing[p]))
        if cuts == before:
            break
    return cuts


def _running(units: Units, order: range) -> list[int]:
    """The cumulative size of the units, in this order."""
    total, sizes = 0, []
    here: set[Hashable] = set()
    for index in order:
        total += sum(size for item, size in units.items[index].items() if item not in here)
        here.update(units.items[index])
        sizes.append(total)
    return sizes

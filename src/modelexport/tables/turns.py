"""Two files timed in turns, A B B A A B, so that whatever else the machine does at the time hits both alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from math import comb

import msgspec

CONFIDENCE = 0.95
"""How often an interval contains the true median."""


class Turns(msgspec.Struct, frozen=True, kw_only=True):
    """The time of two files in turns, and what the noise allows to say about it."""

    first_seconds: float
    """The median of the runs."""
    second_seconds: float
    ratio: float
    """How many times as long as the first the second takes: the median of the turns."""
    interval: tuple[float, float] | None
    """Where the true median of this ratio is with :data:`CONFIDENCE`; ``None`` for too few turns."""
    turns: int

    @property
    def faster(self) -> bool:
        """Whether the second file takes less time, in spite of the noise."""
        return self.interval is not None and self.interval[1] < 1

    @property
    def slower(self) -> bool:
        """Whether the second file takes more time, in spite of the noise."""
        return self.interval is not None and self.interval[0] > 1


def run_in_turns(runs: Sequence[Callable[[], object]], rounds: Iterable[object]) -> list[list[int]]:
    """Nanoseconds of each of some functions in each round; every other round calls them in the opposite order."""
    taken: list[list[int]] = [[] for _ in runs]
    order = list(zip(runs, taken, strict=True))
    for _ in rounds:
        for run, times in order:
            began = time.perf_counter_ns()
            run()
            times.append(time.perf_counter_ns() - began)
        order.reverse()
    return taken


def compare_turns(first: Sequence[int], second: Sequence[int]) -> Turns:
    """The times of two files, run by run, in nanoseconds."""
    ratios = [taken / max(before, 1) for before, taken in zip(first, second, strict=True)]
    return Turns(
        first_seconds=statistics.median(first) / 1e9,
        second_seconds=statistics.median(second) / 1e9,
        ratio=statistics.median(ratios),
        interval=median_interval(ratios),
        turns=len(ratios),
    )


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The narrowest interval between two of the values that contains the true median with :data:`CONFIDENCE`.

    This holds for any distribution: as many values are below the median as heads come up when coins are thrown.

    Returns:
        ``None`` for fewer than six values.
    """
    ordered, outside, skipped = sorted(values), 0, 0
    rare = round(1 / (1 - CONFIDENCE))  # integers: a float does not hold 2 ** 1024
    while 2 * rare * (outside + comb(len(ordered), skipped)) <= 2 ** len(ordered):
        outside += comb(len(ordered), skipped)
        skipped += 1
    return (ordered[skipped - 1], ordered[-skipped]) if skipped else None


def turns_line(turns: Turns, first: str, second: str) -> str:
    """What a comparison of two files shows, in one line."""
    both = f"{second} {turns.second_seconds * 1e3:,.3g} ms, {first} {turns.first_seconds * 1e3:,.3g} ms"
    if turns.interval is None:
        return f"too few turns to rank: {both} a run in {turns.turns}: measure six or more"
    least, most = turns.interval
    shown = f"{turns.ratio:.3g} times as long ({least:.3g} to {most:.3g} in {turns.turns} turns): {both} a run"
    if turns.faster or turns.slower:
        return f"{second} takes {shown}"
    return f"too noisy to rank: {second} takes {shown}"

"""Units with a method each, and the steps to better methods: first those that save most error for what they cost."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from modelexport.tools.quantize.methods import Method
from modelexport.tools.quantize.switched_model import Choice


class Candidate(NamedTuple):
    """A method for a unit."""

    cost: float
    loss: float
    """Losses of several units add up."""
    method: Method | None


class RankedStep(NamedTuple):
    """A unit gets another method, or is kept."""

    unit: int
    option: Candidate
    gain: float
    """The loss that a byte more saves."""


@dataclass(frozen=True)
class RankedSteps:
    """Choices, each of which costs more and loses less than the one before."""

    start: list[Candidate]
    """The cheapest option of each unit."""
    steps: list[RankedStep]

    def methods_after(self, steps: int | Iterable[RankedStep]) -> Choice:
        """The choice after the first steps, or after some of them."""
        options = dict(enumerate(self.start))
        options.update((step.unit, step.option) for step in (self.steps[:steps] if isinstance(steps, int) else steps))
        return {unit: option.method for unit, option in options.items() if option.method is not None}

    def fewest_within(self, holds: Callable[[Choice], bool]) -> list[RankedStep]:
        """The fewest first steps after which something holds, by bisection; all of them if it never does."""
        counts = range(len(self.steps))
        return self.steps[: bisect_left(counts, True, key=lambda count: holds(self.methods_after(count)))]

    def best_for(self, bytes_left: float) -> list[RankedStep]:
        """The affordable steps with the least loss: in their order, or with one first that was skipped in this order.

        Args:
            bytes_left: Bytes of the budget that the cheapest options leave.
        """
        first = self._affordable(bytes_left, self.steps)
        skipped = [step for step in self.steps if step not in first]
        return min([first, *(self._affordable(bytes_left, [step, *self.steps]) for step in skipped)], key=self._loss)

    def _affordable(self, bytes_left: float, steps: Iterable[RankedStep]) -> list[RankedStep]:
        """The steps, in this order, that can be paid; a step back is left out."""
        has = dict(enumerate(self.start))
        taken = []
        for step in steps:
            cost = step.option.cost - has[step.unit].cost
            if step.option.loss < has[step.unit].loss and cost <= bytes_left:
                bytes_left -= cost
                has[step.unit] = step.option
                taken.append(step)
        return taken

    def _loss(self, steps: Iterable[RankedStep]) -> float:
        options = dict(enumerate(self.start)) | {step.unit: step.option for step in steps}
        return sum(option.loss for option in options.values())


def rank_steps(options: Sequence[Sequence[Candidate]]) -> RankedSteps:
    """The steps of units with several options each: the steps that save most for what they cost come first."""
    start, steps = [], []
    for unit, choices in enumerate(options):
        current = min(choices, key=lambda option: (option.cost, option.loss))
        start.append(current)
        while better := [option for option in choices if option.loss < current.loss]:
            gains = {other: (current.loss - other.loss) / (other.cost - current.cost) for other in better}
            current = max(better, key=lambda option: (gains[option], -option.cost))
            steps.append(RankedStep(unit, current, gains[current]))
    return RankedSteps(start, sorted(steps, key=lambda step: -step.gain))

"""Which conditions of sizes a file has: the recorded ones on whose other side it differs from the model.

Most of what torch.export records changes nothing: whether tensors are contiguous, or broadcast. So the model and the
file run with sizes for which a condition does not hold, on each side of each comparison and where its terms are equal.
Only if they agree on all of these, or the model itself refuses such sizes, is the condition dropped.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import msgspec

from modelexport.exporting.fixed_axes import Run, Tried
from modelexport.graph.size_conditions import (
    SizeCondition,
    broken,
    fitting,
    follows,
    next_odd,
    side_of,
    simplified,
    sizes_against,
)
from modelexport.pytorch.inputs.covering_sizes import CoveringSizes


@dataclass
class Settled:
    """The conditions of a file."""

    kept: list[SizeCondition] = field(default_factory=list)
    reasons: dict[str, Tried] = field(default_factory=dict)
    """The formula of a condition to what happens if it does not hold; none for one that was not tried."""


def settle_conditions(
    recorded: Collection[SizeCondition],
    sizes: Mapping[str, int],
    changeable: Collection[str],
    run: Run,
    cover: Callable[[Collection[SizeCondition]], Iterable[Mapping[str, int]]],
) -> Settled:
    """The conditions that a file has.

    Args:
        recorded: Those of its capture.
        sizes: The size of each dynamic axis in the example inputs.
        changeable: The axes that may have another size.
        cover: Runs with sizes of all orders for which conditions hold, and gives those at which the file agrees.
    """
    asked = [
        candidate
        for candidate in recorded
        if set(candidate.symbols) <= sizes.keys() and set(candidate.symbols) & set(changeable)
    ]
    ones = [SizeCondition(f"{symbol} > 1") for symbol in changeable]
    pending = [candidate for candidate in simplified([*asked, *ones]) if candidate.holds(sizes)]
    pending.sort(key=lambda candidate: candidate.makes_number)  # what is known of a size is more than its number
    settling = _Settling(sizes, changeable, run, pending)
    settling.find_base()
    settling.drop_most_by_one_run()
    of_model = [candidate for candidate in pending if candidate.in_model]
    settling.try_each(of_model)
    settling.keep_joint([candidate for candidate in of_model if not candidate.makes_number])
    settling.drop_most_by_one_run()
    settling.drop_implied()
    for agreeing in cover(settling.settled.kept):
        settling.drop_agreeing(agreeing)
    settling.try_each(settling.pending)
    return replace(settling.settled, kept=without_implied(settling.settled.kept))


class _Settling:
    """The conditions that are still to be tried, and those that were kept. Each method leaves fewer to be tried."""

    def __init__(
        self, sizes: Mapping[str, int], changeable: Collection[str], run: Run, pending: Sequence[SizeCondition]
    ) -> None:
        self.sizes = sizes
        self.changeable = changeable
        self.run = run
        self.pending = list(pending)
        self.equal = [candidate for candidate in pending if EQUAL.fullmatch(candidate.formula)]
        self.settled = Settled()
        self.bases = [sizes]
        """Sizes from which one axis at a time is changed."""
        self._sides: dict[str, dict[_Side, list[dict[str, int]]]] = {}
        """The formula of a condition to the sides on which it does not hold and that no run agreed on, with sizes."""

    def find_base(self) -> None:
        """Find sizes that are all different, if the model accepts some: in the example some are equal by chance."""
        if len({*self.sizes.values()}) == len(self.sizes):
            return

        def fits(wanted: Mapping[str, int], free: Collection[str]) -> dict[str, int] | None:
            return fitting(self.pending, wanted, [symbol for symbol in free if symbol in self.changeable])

        free = len(self.sizes) - len(self.equal)
        for other in islice(CoveringSizes(self.sizes, fits), _BASES):
            if len({*other.values()}) >= free and (result := self.run(other)) and result.status in ("agree", "tie"):
                self.bases.insert(0, other)
                return

    def drop_most_by_one_run(self) -> None:
        """Drop the conditions that do not hold at sizes at which most of them do not, if the file agrees there."""
        other = fitting(self.settled.kept, _against_most(self.pending, self.sizes, self.changeable), self.changeable)
        if other is not None and (result := self.run(other)) is not None and result.status in ("agree", "tie"):
            self.drop_agreeing(other)

    def drop_agreeing(self, other: Mapping[str, int]) -> None:
        """Drop the conditions of which every side was tried on which they do not hold; the last one was tried with
        these sizes.
        """
        for condition in list(self.pending):
            if condition.in_model or condition.holds(other):
                continue
            sides = self._sides_against(condition)
            against = sides.get(side_of(condition, other), [])
            if all(_apart(condition, other) >= _apart(condition, each) for each in against):
                sides.pop(side_of(condition, other), None)
            if not sides:
                self.pending.remove(condition)

    def drop_implied(self) -> None:
        """Drop the conditions that hold whenever the kept ones do."""
        self.pending = [candidate for candidate in self.pending if not _always_with(self.settled.kept, candidate)]

    def try_each(self, conditions: Sequence[SizeCondition]) -> None:
        """Keep the conditions without which the file differs, or the model raises."""
        for condition in list(conditions):
            self._try(condition)
            self.pending.remove(condition)

    def keep_joint(self, conditions: Sequence[SizeCondition]) -> None:
        """Keep a condition that does not matter by itself, if the file differs where others do not hold either.

        Of ``n > 20 and m > 20`` both have to be true before the model does something else.
        """
        dropped = [condition for condition in conditions if condition not in self.settled.kept]
        for condition in dropped:
            for group in ([*dropped], *([other] for other in dropped[:_PAIRS])):
                sizes, against = dict(self.sizes), list[SizeCondition]()
                for other in (condition, *group):
                    nearest = sizes_against(other, sizes) if other.holds(sizes) else iter([sizes])
                    found = next((each for each in nearest if not any(one.holds(each) for one in against)), None)
                    sizes, against = (found, [*against, other]) if found is not None else (sizes, against)
                result = self.run(sizes) if len(against) > 1 and not broken(self.settled.kept, sizes) else None
                if result is not None and result.status == "differ":
                    self.settled.kept.append(condition)
                    self.settled.reasons[condition.formula] = result
                    break

    def _sides_against(self, condition: SizeCondition) -> dict[_Side, list[dict[str, int]]]:
        """Sizes for which a condition does not hold, by the order of the two terms that it compares."""
        if condition.formula not in self._sides:
            sides = self._sides.setdefault(condition.formula, {})
            pairs = itertools.zip_longest(
                *(
                    [(base, other) for other in islice(sizes_against(condition, base), _LOOKED_AT)]
                    for base in self.bases
                )
            )
            for base, other in (pair for row in pairs for pair in row if pair is not None):
                changed = other if condition in self.equal else _with_equal(other, base, self.equal)
                if all(changed[name] == size or name in self.changeable for name, size in self.sizes.items()):
                    sides.setdefault(side_of(condition, changed), []).append(changed)
        return self._sides[condition.formula]

    def _try(self, condition: SizeCondition) -> None:
        sizes, settled = self.sizes, self.settled
        others = [candidate for candidate in self.pending if candidate is not condition]
        results: list[Tried | None] = []
        for side, against in self._sides_against(condition).items():
            allowed = [other for other in against if not broken(settled.kept, other)]
            allowed.sort(key=lambda other: (bool(broken(others, other)), -_apart(condition, other)))
            if allowed:
                results.append(_worst_result(allowed, self.run, agreeing=len(self.bases) if 0 in side else _AGREEING))
            if results and results[-1] is not None and results[-1].status == "differ":
                break
        result = max(filter(None, results), key=_badness, default=None)
        if result is not None and result.status == "differ":
            if (as_is := self.run(sizes)) and as_is.status != "differ":
                settled.kept.append(condition)
                settled.reasons[condition.formula] = result
        elif condition.in_model and None in results:
            settled.kept.append(condition)


def _apart(condition: SizeCondition, sizes: Mapping[str, int]) -> int:
    """How many different sizes the axes of a condition have: both branches often agree where these are equal."""
    return len({sizes[symbol] for symbol in condition.symbols})


_Side = tuple[int, ...]
EQUAL = re.compile(r"\w+ == [A-Za-z_]\w*")
"""A condition that two axes are equal."""


def _with_equal(other: Mapping[str, int], sizes: Mapping[str, int], equal: Sequence[SizeCondition]) -> dict[str, int]:
    """Sizes in which the axes that are always equal to a changed one are changed, too."""
    unchanged = [symbol for symbol in other if other[symbol] == sizes[symbol]]
    return fitting(equal, other, unchanged) or dict(other)


def _worst_result(candidates: Sequence[Mapping[str, int]], run: Run, *, agreeing: int) -> Tried | None:
    """The worst that happens at some of several sizes, until enough agree; ``None`` if they are too large."""
    results: list[Tried] = []
    for other in candidates:
        if (result := run(other)) is None:
            continue
        results.append(result)
        agreed = sum(earlier.status in ("agree", "tie") for earlier in results)
        most = _RUNS if agreed or result.status != "not compared" else _REFUSED
        if result.status == "differ" or agreed == agreeing or len(results) >= most:
            break
    return max(results, key=_badness, default=None)


def _badness(tried: Tried) -> int:
    return ("not compared", "tie", "agree", "differ").index(tried.status)


_BASES = 8
"""How many sizes are proposed to find some that are all different."""
_LOOKED_AT, _RUNS, _REFUSED, _AGREEING = 24, 4, 12, 2
"""How many sizes for which a condition does not hold are looked at; how many of one side of it are run, are run if the
model refuses all of them, and have to agree before it is dropped."""

_PAIRS = 4
"""With how many other conditions each is tried."""


def _against_most(
    conditions: Sequence[SizeCondition], sizes: Mapping[str, int], changeable: Collection[str]
) -> dict[str, int]:
    """Sizes of all axes at which most conditions of a single axis are broken; odd for an axis without conditions.

    Only an odd size shows a decision that depends on halves.
    """
    chosen = dict(sizes)
    for symbol in changeable:
        own_conditions = [condition for condition in conditions if condition.symbols == (symbol,)]
        values = Counter(
            other[symbol]
            for condition in own_conditions
            for other in islice(sizes_against(condition, sizes), _LOOKED_AT)
        )
        likely = [value for value, _ in values.most_common() if value > 1]
        chosen[symbol] = likely[0] if likely else next_odd(sizes[symbol])
    return chosen


def _always_with(kept: Sequence[SizeCondition], condition: SizeCondition) -> bool:
    """Whether a condition of one axis holds wherever the kept conditions of the same axis do."""
    about = [known for known in kept if known.symbols == condition.symbols]
    return len(condition.symbols) == 1 and bool(about) and follows(condition, about)


def without_implied(conditions: Sequence[SizeCondition]) -> list[SizeCondition]:
    """Conditions without those that hold wherever the others of the same axis do."""
    kept = list(conditions)
    for condition in conditions:
        if _always_with([other for other in kept if other is not condition], condition):
            kept.remove(condition)
    for symbols in {condition.symbols for condition in kept if len(condition.symbols) == 1}:
        same = [condition for condition in kept if condition.symbols == symbols]
        both = simplified(
            [msgspec.structs.replace(same[0], formula=" and ".join(f"({condition.formula})" for condition in same))]
        )
        if (
            len(same) > 1
            and len(both) == 1
            and len(both[0].formula) <= max(len(condition.formula) for condition in same)
        ):
            kept[kept.index(same[0])] = both[0]
            kept = [condition for condition in kept if condition not in same[1:]]
    return kept

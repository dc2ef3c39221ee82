"""What a file does with sizes that its conditions allow: the file and its model run with a covering set of them.

A capture does not record all that a model decides by sizes: a trace records nothing, and a constant that was made of a
size shows nowhere. Where the file differs, the axes that the difference needs are found: one axis has a condition of
its own, or is fixed; two have the order of the example; of more, one is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, islice, product

from modelexport.exporting.fixed_axes import Run, Tried
from modelexport.exporting.settled_conditions import EQUAL
from modelexport.graph.size_bounds import bounds_of
from modelexport.graph.size_conditions import SizeCondition, broken, fitting, limits_of, next_odd, sizes_within
from modelexport.pytorch.inputs.covering_sizes import RELATIONS, CoveringSizes, related, relation

Sizes = Mapping[str, int]


@dataclass
class UnrecordedDecisions:
    """Runs with a covering set of sizes, and what was found by them.

    Args:
        sizes: Those of the example.
        run: Runs the model and the file.
        equal: Conditions ``a == b`` of the capture. Axes that they make equal change together, if the model needs it.
    """

    sizes: Sizes
    run: Run
    equal: Sequence[SizeCondition] = ()
    conditions: list[SizeCondition] = field(default_factory=list)
    """Conditions that no capture recorded."""
    fixed: dict[str, Tried] = field(default_factory=dict)
    """Axes for which no other size is right, to what happens. Those of the file's earlier exports are given."""
    reasons: dict[str, Tried] = field(default_factory=dict)
    """Formulas of the conditions to what happens if they do not hold."""
    accepted: list[Sizes] = field(default_factory=list)
    """Sizes that the model accepts."""

    def agreeing(self, known: Collection[SizeCondition]) -> Iterator[Sizes]:
        """Run with sizes for which conditions hold; those at which the file agrees."""
        for sizes, result in self._runs(known):
            if result.status in ("agree", "tie"):
                yield sizes

    def find(self, known: Collection[SizeCondition]) -> None:
        """Find conditions besides the known ones, and axes to be fixed, until the file agrees wherever it runs."""
        seen: set[frozenset[str]] = set()
        while (found := self._first_difference(known)) is not None:
            if (as_is := self.run(self.sizes)) is None or as_is.status == "differ":
                return  # what differs with the sizes of the example is not due to any other size
            other, result = found
            needed = self._needed(other, [*known, *self.conditions])
            condition = None
            if frozenset(needed) not in seen:
                seen.add(frozenset(needed))
                condition = self._condition(needed, other, [*known, *self.conditions])
            if condition is None:
                self.fixed[needed[-1]] = result
            else:
                self.conditions.append(condition)
                self.reasons[condition.formula] = result

    def _first_difference(self, known: Collection[SizeCondition]) -> tuple[Sizes, Tried] | None:
        runs = self._runs([*known, *self.conditions])
        return next(((sizes, result) for sizes, result in runs if result.status == "differ"), None)

    def _runs(self, conditions: Collection[SizeCondition]) -> Iterator[tuple[Sizes, Tried]]:
        """Runs that the model accepts. First axes that a capture found to be equal stay so; then they need not."""
        changeable = [symbol for symbol in self.sizes if symbol not in self.fixed]
        fixed = {symbol: self.sizes[symbol] for symbol in self.fixed}
        for equal in (self.equal, ()) if self.equal else ((),):
            within = [*conditions, *equal]
            known = [sizes for sizes in self.accepted if fixed.items() <= sizes.items() and not broken(within, sizes)]

            def fits(sizes: Sizes, free: Collection[str], within: Sequence[SizeCondition] = within) -> Sizes | None:
                return fitting(within, {**sizes, **fixed}, [symbol for symbol in free if symbol in changeable])

            for sizes in known:
                if (result := self.run(sizes)) is not None:
                    yield sizes, result
            cover = CoveringSizes(self.sizes, fits, known, self.fixed)
            limits = (sizes for sizes in limits_of(conditions, self.sizes) if fits(sizes, ()) == sizes)
            for sizes in chain(cover, limits, islice(self._small(within, fits), _MOST_SMALL_RUNS)):
                result = self.run(sizes) if sizes not in self.accepted else None
                if result is not None and result.status != "not compared":
                    self.accepted.append(sizes)
                    cover.accept(sizes)
                    yield sizes, result

    def _small(
        self, conditions: Sequence[SizeCondition], fits: Callable[[Sizes, Collection[str]], Sizes | None]
    ) -> Iterator[Sizes]:
        """All small sizes of two axes, one of which decides something: the decision may be more than a bound or an
        order.
        """
        deciding = {name for each in conditions if not EQUAL.fullmatch(each.formula) for name in each.symbols}
        open_axes = [symbol for symbol in self.sizes if symbol not in self.fixed]
        pairs = [pair for pair in combinations(open_axes, 2) if not deciding.isdisjoint(pair)]
        for some in sorted(pairs, key=lambda pair: -len(deciding.intersection(pair))):
            for sizes in product(range(1, _LARGEST_SMALL_SIZE + 1), repeat=2):
                wanted = {**self.sizes, **dict(zip(some, sizes, strict=True))}
                if fits(wanted, ()) is not None:
                    yield wanted

    def _needed(self, other: Sizes, conditions: Collection[SizeCondition]) -> list[str]:
        """The fewest axes whose other sizes show a difference, one by one set back to the example's."""
        needed = [symbol for symbol in other if other[symbol] != self.sizes[symbol]]
        alike = [
            [two for two in needed if (self.sizes[two], other[two]) == (self.sizes[one], other[one])] for one in needed
        ]
        for back in [*(group for group in alike if len(group) > 1), *([symbol] for symbol in needed)]:
            fewer = [one for one in needed if one not in back]
            less = {**self.sizes, **{one: other[one] for one in fewer}}
            if fewer and not broken(conditions, less) and (result := self.run(less)) and result.status == "differ":
                needed = fewer
        return needed

    def _condition(
        self, needed: Sequence[str], other: Sizes, conditions: Collection[SizeCondition]
    ) -> SizeCondition | None:
        """A condition of the axes that a difference needs; ``None`` if none is found."""
        if len(needed) == 1:
            second = self._axis_in_order(needed[0], other, conditions)
            if second is None:
                return self._condition_of(needed[0], conditions)
            needed = [*needed, second]
        return self._order_of(needed[0], needed[1], other, conditions) if len(needed) == 2 else None

    def _axis_in_order(self, symbol: str, other: Sizes, conditions: Collection[SizeCondition]) -> str | None:
        """A second axis with which the file is right once its size restores the example's order of both."""
        for second in self.sizes:
            if (
                second == symbol
                or second in self.fixed
                or _order(self.sizes, symbol, second) == _order(other, symbol, second)
            ):
                continue
            sizes = {**other, second: max(other[symbol] + self.sizes[second] - self.sizes[symbol], 1)}
            if _order(sizes, symbol, second) != _order(self.sizes, symbol, second) or broken(conditions, sizes):
                continue
            if (result := self.run(sizes)) is not None and result.status in ("agree", "tie"):
                return second
        return None

    def _condition_of(self, symbol: str, conditions: Collection[SizeCondition]) -> SizeCondition | None:
        """The sizes of one axis with which the file is right; ``None`` if there is only one."""
        size = self.sizes[symbol]
        values = [1, 2, 3, size - 1, size + 1, size + 2, 2 * size, size // 2, next_odd(2 * size), 4 * size]

        def status(value: int) -> str:
            sizes = {**self.sizes, symbol: value}
            result = self.run(sizes) if not broken(conditions, sizes) else None
            return result.status if result is not None else "not compared"

        results = {value: status(value) for value in dict.fromkeys(values) if value > 0 and value != size}
        alike = {v: s != "differ" for v, s in results.items() if s != "not compared"}
        if not any(alike.values()):
            return None
        formula = bounds_of({size: True, **alike}, size, lambda value: status(value) != "differ").format(symbol)
        condition = SizeCondition(formula)
        return condition if formula and sizes_within([condition], self.sizes, symbol) else None

    def _order_of(
        self, first: str, second: str, other: Sizes, conditions: Collection[SizeCondition]
    ) -> SizeCondition | None:
        """The relation of two axes with which the file is right; ``None`` if it does not depend on it."""
        before = relation(self.sizes[first], self.sizes[second])
        now = relation(other[first], other[second])
        right = {before} if before != now else set()
        for kind in {*RELATIONS} - {before, now}:
            statuses = set()
            for changed in related(first, second, kind, self.sizes):
                sizes = {**self.sizes, **changed}
                result = self.run(sizes) if not broken(conditions, sizes) else None
                statuses |= {result.status} if result is not None else set()
            right |= {kind} if statuses & {"agree", "tie"} and "differ" not in statuses else set()
        formula = _formula_of(right, before, first, second) if right else ""
        return SizeCondition(formula) if formula else None


_LARGEST_SMALL_SIZE, _MOST_SMALL_RUNS = 6, 72
"""The largest of the small sizes that are all tried for pairs of deciding axes, and the most runs of this kind."""


def _formula_of(right: Collection[int], before: int, first: str, second: str) -> str:
    """A formula of two axes that holds for the right relations next to that of the example."""
    if {*right} == {*RELATIONS} - {0}:
        return f"{first} != {second}"
    least = next(kind for kind in range(before, -4, -1) if kind - 1 not in right)
    most = next(kind for kind in range(before, 4) if kind + 1 not in right)
    if least == most == 0:
        return f"{first} == {second}"
    lower = {
        -1: f"2 * {first} > {second}",
        0: f"{first} >= {second}",
        1: f"{first} > {second}",
        2: f"{first} >= 2 * {second}",
    }
    upper = {
        -2: f"2 * {first} <= {second}",
        -1: f"{first} < {second}",
        0: f"{first} <= {second}",
        1: f"{first} < 2 * {second}",
    }
    return " and ".join(filter(None, (lower.get(least), upper.get(most))))


def _order(sizes: Sizes, first: str, second: str) -> int:
    return (sizes[first] > sizes[second]) - (sizes[first] < sizes[second])

"""Sizes to try of dynamic axes: few runs in which each axis differs from the example, and every two are in each order.

An axis that is larger than one in the example is one in a run, and larger than in the example in another; an axis of
size one is two and three. Of every two axes the first is half as large or less, smaller, as large, larger, and twice as
large or more (:func:`relation`). A model accepts different sizes:
any, multiples of a patch or a window, or other sizes of some axes only. So sizes are proposed in several ways until
each of these has been accepted in some run, or all were refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, islice
from math import lcm

from modelexport.graph.size_conditions import larger

Sizes = Mapping[str, int]
Fact = tuple[str, int | str] | tuple[str, str, int]
"""A size of an axis (1, 2, 3 or ``larger``), or the relation of two."""
RELATIONS = (-2, -1, 0, 1, 2)


def relation(first: int, second: int) -> int:
    """How two sizes compare: 0 if they are equal, 1 if the first is larger, 2 if it is at least twice as large, or
    negative.
    """
    if first < second:
        return -relation(second, first)
    return (first > second) + (first >= 2 * second)


class CoveringSizes:
    """Sizes to try, of which the caller says which were accepted.

    Args:
        sizes: Those of the example.
        fits: The sizes nearest to some for which the conditions of a file hold, changing only the axes of the second
            argument; ``None`` if there are none.
        tried: Sizes with which the file was run, and accepted.
        fixed: Axes that keep their size. The other axes are tried in each order with them, too.
    """

    def __init__(
        self,
        sizes: Sizes,
        fits: Callable[[Sizes, Collection[str]], Sizes | None] = lambda sizes, changeable: sizes,
        tried: Iterable[Sizes] = (),
        fixed: Collection[str] = (),
    ) -> None:
        self._example = {symbol: size for symbol, size in sizes.items() if size > 0 and symbol not in fixed}
        self._rest = {symbol: size for symbol, size in sizes.items() if symbol not in self._example}
        self._sizes = {symbol: size for symbol, size in sizes.items() if size > 0}
        self._pairs = [pair for pair in combinations(self._sizes, 2) if not self._example.keys().isdisjoint(pair)]
        self._fits = fits
        self._wanted: set[Fact] = set()
        for symbol, size in self._example.items():
            self._wanted |= {(symbol, 2), (symbol, 3)} if size == 1 else {(symbol, 1), (symbol, "larger")}
        for first, second in self._pairs:
            self._wanted |= {(first, second, kind) for kind in RELATIONS}
        self._proposed: list[Sizes] = [dict(sizes)]
        self._changed: set[str] = set()
        for accepted in (sizes, *tried):
            self.accept(accepted)

    def accept(self, sizes: Sizes) -> None:
        """Note that a model accepts sizes."""
        self._wanted -= self._facts(sizes)
        self._changed |= {symbol for symbol, size in self._example.items() if sizes[symbol] != size}

    @property
    def unchanged(self) -> list[str]:
        """The axes of which no other size was accepted."""
        return [symbol for symbol in self._example if symbol not in self._changed]

    def __iter__(self) -> Iterator[dict[str, int]]:
        yield from islice(self._useful(), _MOST_PROPOSED)

    def _useful(self) -> Iterator[dict[str, int]]:
        for proposed in self._proposals():
            wanted = {**self._rest, **self._example, **proposed}
            sizes = self._fits(wanted, [one for one in wanted if one not in proposed]) or self._fits(wanted, wanted)
            if sizes is not None and sizes not in self._proposed and self._facts(sizes) & self._wanted:
                self._proposed.append(sizes)
                yield dict(sizes)

    def _facts(self, sizes: Sizes) -> set[Fact]:
        facts: set[Fact] = set()
        for symbol, size in self._example.items():
            facts.add((symbol, sizes[symbol]))
            facts |= {(symbol, "larger")} if sizes[symbol] > size else set()
        for first, second in self._pairs:
            facts.add((first, second, relation(sizes[first], sizes[second])))
        return facts

    def _proposals(self) -> Iterator[Sizes]:
        """Propose sizes of all axes, of axes of equal size, of each axis, of all that are changeable, and of two."""
        example = self._example
        yield from _of_all(example)
        groups = [[symbol for symbol in example if example[symbol] == size] for size in dict.fromkeys(example.values())]
        for group in [*groups, *([symbol] for symbol in example if len(example) > len(groups))]:
            for size in _other(example[group[0]]):
                yield dict.fromkeys(group, size)
        changeable = {symbol: size for symbol, size in example.items() if symbol in self._changed}
        if len(changeable) < len(example):
            yield from _of_all(changeable)
        for first, second in self._pairs:
            for kind in RELATIONS:
                for proposed in related(first, second, kind, self._sizes):
                    if (first, second, kind) in self._wanted and proposed.keys() <= self._changed:
                        yield proposed


def _of_all(example: Sizes) -> Iterator[Sizes]:
    """Other sizes of all axes, in both orders and equal: any, then multiples and parts of those of the example."""
    if not example:
        return
    rising = sorted(example, key=lambda symbol: example[symbol])
    falling = rising[::-1]
    yield _increasing(rising, {symbol: _above(size) for symbol, size in example.items()})
    yield dict.fromkeys(example, 1)
    yield _increasing(falling, {symbol: _up_from(2, size) for symbol, size in example.items()}, factor=3)
    yield dict.fromkeys(example, next(size for size in range(3, 99) if size not in example.values()))
    even = len(example) // 2 * 2 + 2
    for symbols in (falling, rising):  # none is twice as large as another, and neighbours have equal halves
        yield {symbol: even + place for place, symbol in enumerate(symbols)}
    yield _increasing(rising, {symbol: _up_from(1, size) for symbol, size in example.items()}, factor=3)
    yield {symbol: 2 * size for symbol, size in example.items()}
    yield _increasing(falling, {symbol: _fractions_and_multiples(size) for symbol, size in example.items()})
    yield _increasing(rising, {symbol: _multiples(size) for symbol, size in example.items()})
    yield dict.fromkeys(example, lcm(*example.values()))
    yield {symbol: max(size // 2, 1) for symbol, size in example.items()}
    yield {symbol: max(size - max(size // 5, 1), 1) for symbol, size in example.items()}


_MOST_PROPOSED = 32
"""How many sizes are proposed, most of which a model refuses if it refuses the first ones."""


def _increasing(symbols: Sequence[str], choices: Mapping[str, Iterator[int]], factor: int = 1) -> dict[str, int]:
    """Sizes of which each is larger than those of the axes before it, or at least a factor times as large."""
    sizes: dict[str, int] = {}
    last = 0
    for symbol in symbols:
        last = sizes[symbol] = next((size for size in choices[symbol] if size > last and size >= factor * last), last)
    return sizes


def _up_from(first: int, but: int) -> Iterator[int]:
    return (size for size in range(first, 2**31) if size != but)


def _above(size: int) -> Iterator[int]:
    """Larger sizes, the first of them odd: what rounds, or is as long as the example, shows with these."""
    return _up_from((size + 1 if size < _SMALL_SIZE else larger(size)) | 1, size)


_SMALL_SIZE = 4
"""Below this, a size grows by one or two: batches mostly, whose rows are alike."""


def _multiples(size: int) -> Iterator[int]:
    return (times * size for times in range(2, 2**15))


def _fractions_and_multiples(size: int) -> Iterator[int]:
    yield from (size // part for part in (4, 2) if size % part == 0)
    yield from _multiples(size)


def _other(size: int) -> list[int]:
    """Other sizes of an axis alone."""
    sizes = [3, 2, size + 1] if size == 1 else [next(_above(size)), 2 * size, 1, size // 2, size - 1, size + 1]
    return [other for other in dict.fromkeys(sizes) if other not in (0, size)]


def related(first: str, second: str, kind: int, example: Sizes) -> Iterator[Sizes]:
    """Sizes of two axes of one relation, most of them with one as in the example."""
    one, other = example[first], example[second]
    proposed: list[Sizes] = []
    if kind == 0:
        proposed = [{first: other}, {second: one}, {first: lcm(one, other), second: lcm(one, other)}]
    lower, upper = (first, second) if kind < 0 else (second, first)
    below, above = example[upper], example[lower]
    if abs(kind) == 1:
        proposed = [{lower: below - 1}, {upper: above + 1}, {lower: below * 3 // 4}]
        proposed += [{lower: size, upper: most} for size in (above, below, 2) for most in (size + 1, 2 * size - 1)]
        proposed += [{lower: 2 * size, upper: 3 * size} for size in (above, below)]
    if abs(kind) == 2:
        proposed = [{lower: size} for size in (above // 4, above // 2, below // 4, below // 2)]
        proposed += [{upper: next(size for size in _multiples(below) if size >= 2 * above)}]
        proposed += [{upper: 2 * above}, {lower: 1}, {lower: below, upper: 2 * below}]
    for sizes in proposed:
        if min(sizes.values()) > 0 and relation(sizes.get(first, one), sizes.get(second, other)) == kind:
            yield sizes

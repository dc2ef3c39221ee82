"""Conditions of sizes: formulas in the names of a file's dynamic axes, such as ``n < 24`` or ``h % 4 == 0``."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, reduce
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir

from modelexport.core.limits import FORMULA_CHARACTERS
from modelexport.errors import FileFormatError, UsageError
from modelexport.format import keys
from modelexport.format.documents import ValidIf
from modelexport.graph.properties import record, recorded
from modelexport.graph.size_formulas import NOT_EVALUATED, evaluated, names_in
from modelexport.graph.size_symbols import SYMBOL

Sizes = Mapping[str, int]


class SizeCondition(ValidIf, frozen=True):
    """A condition of the sizes of a file."""

    in_model: bool = False
    """Whether the model's own code compares sizes, and not code of torch that the line calls."""
    makes_number: bool = False
    """Whether the line makes a plain number of a size, ``int(len(x))``: what is decided by that is not recorded."""

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names of axes in the formula."""
        return names_in(self.formula)

    def holds(self, sizes: Mapping[str, Any]) -> Any:
        """Whether the condition holds for sizes, or for arrays of sizes. True if the formula cannot be evaluated."""
        try:
            return evaluated(self.formula, sizes)
        except NOT_EVALUATED:
            return True


def conditions_of(model: ir.Model) -> list[SizeCondition]:
    """The conditions that a model carries; none if those of its file cannot be read."""
    try:
        return conditions_of_formulas(recorded(model, keys.VALID_IF) or [])
    except FileFormatError:
        return []


def conditions_of_formulas(formulas: Iterable[str]) -> list[SizeCondition]:
    """Conditions from the formulas in a file, without those that are too long to be looked at."""
    return [SizeCondition(formula) for formula in formulas if len(formula) <= FORMULA_CHARACTERS]


def check_sizes(conditions: Collection[SizeCondition], sizes: Sizes) -> None:
    """Refuse sizes for which a file is not right."""
    if failing := broken(conditions, sizes):
        broken_sizes = ", ".join(f"{symbol} is {sizes[symbol]}" for symbol in failing[0].symbols)
        raise UsageError(
            f"the file is right only for {failing[0].formula}, and {broken_sizes}: give other sizes, or export"
            " with an example of these"
        )


def record_conditions(model: ir.Model, conditions: Collection[SizeCondition]) -> None:
    """Record conditions in a model, in place."""
    record(model, keys.VALID_IF, [condition.formula for condition in conditions] or None)


def renamed(conditions: Collection[SizeCondition], symbols: Mapping[str, str]) -> tuple[SizeCondition, ...]:
    """Conditions with other names of axes, or numbers in their place; those without an axis are left out."""
    changed = (
        msgspec.structs.replace(
            condition, formula=SYMBOL.sub(lambda name: f"({new})" if (new := symbols.get(name[0], name[0])) != name[0]
            and not SYMBOL.fullmatch(new) else new, condition.formula)
        )
        for condition in conditions
    )  # fmt: skip
    return simplified([condition for condition in changed if condition.symbols])


def simplified(conditions: Collection[SizeCondition]) -> tuple[SizeCondition, ...]:
    """Conditions in their simplest form, each once, without those that always hold."""
    by_formula: dict[str, SizeCondition] = {}
    for condition in conditions:
        formula = _as_written(_simplest(condition))
        known = by_formula.get(formula)
        more = known is None or (condition.makes_number, condition.in_model) > (known.makes_number, known.in_model)
        if formula and more:
            by_formula[formula] = msgspec.structs.replace(condition, formula=formula)
    return tuple(by_formula.values())


def broken(conditions: Collection[SizeCondition], sizes: Sizes) -> list[SizeCondition]:
    """The conditions that do not hold for sizes. A condition of an axis without a size is not looked at."""
    return [
        condition
        for condition in conditions
        if sizes.keys() >= set(condition.symbols) and not bool(condition.holds(sizes))
    ]


def fitting(conditions: Collection[SizeCondition], wanted: Sizes, changeable: Collection[str]) -> dict[str, int] | None:
    """The sizes nearest to those wanted for which conditions hold; ``None`` if none are found.

    Args:
        changeable: The names of the axes that may have another size than the wanted one.
    """
    sizes = dict(wanted)
    for _ in range(len(conditions) + 1):
        failing = broken(conditions, sizes)
        if not failing:
            return sizes
        for symbol in [name for name in failing[0].symbols if name in changeable]:
            values = _values(failing[0].formula, sizes[symbol])
            about = [
                condition
                for condition in conditions
                if symbol in condition.symbols and sizes.keys() >= set(condition.symbols)
            ]
            right = values[_all_hold(about, {**sizes, symbol: values}, len(values))]
            if right.size:
                sizes[symbol] = int(right[np.argmin(np.abs(right - sizes[symbol]))])
                break
        else:
            return None
    return None


def sizes_against(condition: SizeCondition, sizes: Sizes) -> Iterator[dict[str, int]]:
    """Sizes for which a condition does not hold, in which one axis differs from given ones; the nearest ones first.

    If one axis cannot break it, as ``min(n, m) <= 20``, all of its axes have one size.
    """
    near = [_near([condition], sizes, symbol, False) for symbol in condition.symbols]
    yield from (candidate for row in itertools.zip_longest(*near) for candidate in row if candidate is not None)
    if not any(near):
        largest = max(sizes[symbol] for symbol in condition.symbols) if condition.symbols else 0
        equal = ({**sizes, **dict.fromkeys(condition.symbols, int(n))} for n in _values(condition.formula, largest))
        yield from itertools.islice((other for other in equal if not condition.holds(other)), _NEAREST)


def side_of(condition: SizeCondition, sizes: Sizes) -> tuple[int, ...]:
    """The order of the terms of each comparison in a condition, for sizes: -1, 0 or 1."""
    return tuple(int(np.sign(int(difference.holds(sizes)))) for difference in _differences(condition.formula))


def limits_of(conditions: Iterable[SizeCondition], sizes: Sizes) -> Iterator[dict[str, int]]:
    """The last sizes on this side of each condition, in which one axis differs from given sizes."""
    for condition in conditions:
        known = sizes.keys() >= {*condition.symbols}
        for other in itertools.islice(sizes_against(condition, sizes), _LIMITS) if known else ():
            for symbol in [name for name in other if other[name] != sizes[name]][:1]:  # none if it does not hold now
                inner = other[symbol] + (1 if other[symbol] < sizes[symbol] else -1)
                if inner != sizes[symbol]:
                    yield {**sizes, symbol: inner}


_LIMITS = 2
"""From how many sizes on the other side of a condition one on this side is found."""


def sizes_within(conditions: Collection[SizeCondition], sizes: Sizes, symbol: str) -> list[dict[str, int]]:
    """Sizes for which conditions hold, in which one axis differs from given ones; the nearest ones first."""
    return _near([condition for condition in conditions if symbol in condition.symbols], sizes, symbol, True)


def _near(conditions: Collection[SizeCondition], sizes: Sizes, symbol: str, holds: bool) -> list[dict[str, int]]:
    """Sizes in which an axis has another size, one for which conditions hold or not: above, below, far away in turn."""
    size, values = sizes[symbol], _values(" ".join(item.formula for item in conditions), sizes[symbol])
    held = values[_all_hold(conditions, {**sizes, symbol: values}, len(values)) == holds]
    above, below = held[held > size][:_NEAREST], held[held < size][::-1][:_NEAREST]
    far = [*held[held > 2 * size][:1], *np.intersect1d(held, [4 * size, 3 * size])]
    chosen = (item for row in itertools.zip_longest(above, below, far) for item in row if item is not None)
    return [{**sizes, symbol: int(item)} for item in dict.fromkeys(chosen)]


def larger(size: int) -> int:
    """A size that is larger by an eighth, and by eight or as much again where that is little."""
    return size + max(size // 8, min(size, 8))


def next_odd(size: int) -> int:
    """An odd size about an eighth larger: no multiple of the strides and tiles of kernels."""
    return (size + max(size // 8, 1)) | 1


def follows(condition: SizeCondition, others: Collection[SizeCondition]) -> bool:
    """Whether a condition of one axis holds wherever others of the same axis do."""
    values = _values(" ".join(each_condition.formula for each_condition in (condition, *others)))
    sizes = {condition.symbols[0]: values}
    return not (_all_hold(others, sizes, len(values)) & ~_all_hold([condition], sizes, len(values))).any()


_NEAREST = 8
"""How many sizes on each side of the given one are looked at."""
_DENSE = 4096
"""All sizes up to this one are looked at, and above it those near the numbers of a formula."""


def _all_hold(conditions: Collection[SizeCondition], sizes: Mapping[str, Any], count: int) -> Any:
    held = (np.broadcast_to(np.asarray(condition.holds(sizes), dtype=bool), (count,)) for condition in conditions)
    return reduce(np.logical_and, held, np.ones(count, dtype=bool))


@cache
def _values(formula: str, size: int = 1) -> Any:
    """Sizes at which a formula may change, in order: small ones, and those near its numbers and their products."""
    numbers = {size, *(int(text) for text in re.findall(r"\b\d{1,9}\b", formula))}
    pairs = {a * b for a in numbers for b in numbers} | {a // b for a in numbers for b in numbers if b}
    some = {near for number in numbers | pairs for near in range(number - 2, number + 3) if _DENSE < near < 2**31}
    return np.array([*range(1, _DENSE + 1), *sorted(some)], dtype=np.int64)


_PADDING = re.compile(r"\(\((\d+) \+ \(-1\)\*\((.+) % \1\)\) % \1\) (?:<=|==) 0")


@cache
def _simplest(condition: SizeCondition) -> str:
    """The simplest formula that is the same for all sizes; empty if it always holds."""
    formula, names = condition.formula, condition.symbols
    if (padding := _PADDING.fullmatch(formula)) is not None and len(names) == 1:  # (k - x % k) % k is 0 if x % k is
        return _simplest(SizeCondition(f"{padding[2]} % {padding[1]} == 0"))
    if len(names) != 1:
        return formula if names and not _always_holds(condition) else ""
    name, values = names[0], _values(formula)
    held = _all_hold([condition], {name: values}, len(values))
    if held.all():
        return ""
    if not held.any() or re.fullmatch(rf"{name} (<|<=|>|>=|==|!=) \d+|{name} % \d+ (==|!=) \d+", formula):
        return formula
    first, last, wrong, dense = values[held][0], values[held][-1], values[~held][0], held[:_DENSE]
    simple = [f"{name} > 1", f"{name} == {first}", f"{name} != {wrong}"]
    if first == 1 or first - 1 in values:
        simple += [f"{name} >= {first}"]
        if last + 1 in values:
            simple += [f"{name} <= {last}", f"{first} <= {name} <= {last}"]
    period = next(
        (candidate for candidate in range(2, _DENSE // 4) if (dense[candidate:] == dense[:-candidate]).all()), 0
    )
    if period:
        simple += [f"{name} % {period} == {first % period}", f"{name} % {period} != {wrong % period}"]
    return next(
        (candidate for candidate in simple if (SizeCondition(candidate).holds({name: values}) == held).all()), formula
    )


def _always_holds(condition: SizeCondition) -> bool:
    """Whether a condition of several axes holds for all of many sizes that are drawn."""
    values, draw = _values(condition.formula), np.random.default_rng(0)
    sizes = {
        name: np.concatenate([draw.choice(values, _DRAWN), draw.integers(1, 64, _DRAWN)]) for name in condition.symbols
    }
    return bool(_all_hold([condition], sizes, 2 * _DRAWN).all())


_DRAWN = 5000


@cache
def _differences(formula: str) -> list[SizeCondition]:
    """For each comparison in a formula, the difference of its terms, whose sign is their order."""
    try:
        compared = [node for node in ast.walk(ast.parse(formula, mode="eval")) if isinstance(node, ast.Compare)]
    except NOT_EVALUATED:
        return []
    return [
        SizeCondition(f"({ast.unparse(left)}) - ({ast.unparse(right)})")
        for node in compared
        for left, right in itertools.pairwise([node.left, *node.comparators])
    ]


@cache
def _as_written(formula: str) -> str:
    """A formula as a person writes it: ``n - m != 2 * k + 1`` for ``n + ((-1)*m) != (1 + 2*k)``."""
    try:
        return ast.unparse(_AsWritten().visit(ast.parse(formula, mode="eval")))
    except NOT_EVALUATED:
        return formula


class _AsWritten(ast.NodeTransformer):
    """Makes differences of sums with negative terms, and puts numbers behind other terms."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Add):
            return node
        terms = sorted([node.left, node.right], key=lambda each: isinstance(each, ast.Constant))
        terms.sort(key=lambda each: _negated(each) is not None)
        subtracted = _negated(terms[1])
        if subtracted is None:
            return ast.BinOp(terms[0], ast.Add(), terms[1])
        return ast.BinOp(terms[0], ast.Sub(), subtracted)


def _negated(term: ast.expr) -> ast.expr | None:
    """What is to be subtracted instead of adding a term; ``None`` if the term has no sign."""
    if isinstance(term, ast.UnaryOp) and isinstance(term.op, ast.USub):
        return term.operand
    if not isinstance(term, ast.BinOp) or not isinstance(term.op, ast.Mult):
        return None
    factor = _negated(term.left)
    is_one = isinstance(factor, ast.Constant) and factor.value == 1
    return term.right if is_one else None if factor is None else ast.BinOp(factor, ast.Mult(), term.right)


def conditions_in_words(conditions: Sequence[ValidIf]) -> str:
    """``valid for n < 24, h % 4 == 0``"""
    return f"valid for {', '.join(condition.formula for condition in conditions)}"


def stated_with_line(condition: ValidIf) -> str:
    """``n < 24 (net.py:12 decides by it: `if n >= 24:`)``"""
    line = f" ({condition.where} decides by it: `{condition.source}`)" if condition.where else ""
    return f"{condition.formula}{line}"

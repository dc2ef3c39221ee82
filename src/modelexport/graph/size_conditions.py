"""Conditions of sizes: formulas in the names of a file's dynamic axes, such as ``n < 24`` or ``h % 4 == 0``.

A formula is Python: integers, names, ``+ - * // / % **``, comparisons, ``and or not``, ``min``, ``max``, ``abs`` and
``math.ceil``, ``math.floor``, ``math.trunc``. Nothing else is evaluated.
"""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial, reduce
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir

from modelexport.errors import UsageError
from modelexport.format import keys
from modelexport.format.documents import ValidIf
from modelexport.graph.size_symbols import SYMBOL

Sizes = Mapping[str, int]


class SizeCondition(ValidIf, frozen=True):
    """A condition of the sizes of a file."""

    in_model: bool = False
    """Whether the model's own code compares sizes, and not code of torch that the line calls."""

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names of axes in the formula."""
        return _symbols(self.formula)

    def holds(self, sizes: Mapping[str, Any]) -> Any:
        """Whether the condition holds for sizes, or for arrays of sizes. True if the formula cannot be evaluated."""
        try:
            with np.errstate(all="ignore"):
                return eval(_compiled(self.formula), _KNOWN, {name: sizes[name] for name in self.symbols})
        except (
            ArithmeticError,
            LookupError,
            NameError,
            ValueError,
            TypeError,
            SyntaxError,
            RecursionError,
            MemoryError,
        ):
            return True


_NOT_EVALUATED = (
    ArithmeticError,
    LookupError,
    NameError,
    ValueError,
    TypeError,
    SyntaxError,
    RecursionError,
    MemoryError,
)
"""What evaluating raises for a formula that a file should not have."""


def conditions_of(model: ir.Model) -> list[SizeCondition]:
    """The conditions in the metadata of a file; none if they cannot be read."""
    return read_conditions(model.metadata_props)


def read_conditions(properties: Mapping[str, str]) -> list[SizeCondition]:
    """The conditions in the metadata of a file; none if they cannot be read."""
    try:
        formulas = msgspec.json.decode(properties.get(keys.VALID_IF, "[]"), type=list[str])
    except msgspec.MsgspecError:
        return []
    return [SizeCondition(formula) for formula in formulas if len(formula) <= _LONGEST]


def check_sizes(conditions: Collection[SizeCondition], sizes: Sizes) -> None:
    """Refuse sizes for which a file is not right.

    Raises:
        UsageError: A condition does not hold.
    """
    if failing := broken(conditions, sizes):
        given = ", ".join(f"{symbol} is {sizes[symbol]}" for symbol in failing[0].symbols)
        raise UsageError(
            f"the file is right only for {failing[0].formula}, and {given}: give other sizes, or export with an example"
            " of these"
        )


def put_conditions(model: ir.Model, conditions: Collection[SizeCondition]) -> None:
    """Write conditions into the metadata of a file, in place."""
    model.metadata_props.pop(keys.VALID_IF, None)
    if conditions:
        model.metadata_props[keys.VALID_IF] = msgspec.json.encode([one.formula for one in conditions]).decode()


def renamed(conditions: Collection[SizeCondition], symbols: Mapping[str, str]) -> tuple[SizeCondition, ...]:
    """Conditions with other names of axes, or numbers in their place; those without an axis are left out."""
    changed = (
        msgspec.structs.replace(
            one, formula=SYMBOL.sub(lambda name: f"({new})" if (new := symbols.get(name[0], name[0])) != name[0]
            and not SYMBOL.fullmatch(new) else new, one.formula)
        )
        for one in conditions
    )  # fmt: skip
    return simplified([one for one in changed if one.symbols])


def simplified(conditions: Collection[SizeCondition]) -> tuple[SizeCondition, ...]:
    """Conditions in their simplest form, each once, without those that always hold."""
    found: dict[str, SizeCondition] = {}
    for one in conditions:
        formula = _simplest(one)
        if formula and (formula not in found or (one.in_model and not found[formula].in_model)):
            found[formula] = msgspec.structs.replace(one, formula=formula)
    return tuple(found.values())


def broken(conditions: Collection[SizeCondition], sizes: Sizes) -> list[SizeCondition]:
    """The conditions that do not hold for sizes. A condition of an axis without a size is not looked at."""
    return [one for one in conditions if sizes.keys() >= set(one.symbols) and not bool(one.holds(sizes))]


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
            about = [one for one in conditions if symbol in one.symbols and sizes.keys() >= set(one.symbols)]
            right = values[_all_hold(about, {**sizes, symbol: values}, len(values))]
            if right.size:
                sizes[symbol] = int(right[np.argmin(np.abs(right - sizes[symbol]))])
                break
        else:
            return None
    return None


def sizes_against(condition: SizeCondition, sizes: Sizes) -> Iterator[dict[str, int]]:
    """Sizes for which a condition does not hold, in which one axis differs from given ones; the nearest ones first."""
    near = [_near([condition], sizes, symbol, False) for symbol in condition.symbols]
    yield from (one for row in itertools.zip_longest(*near) for one in row if one is not None)


def sizes_within(conditions: Collection[SizeCondition], sizes: Sizes, symbol: str) -> list[dict[str, int]]:
    """Sizes for which conditions hold, in which one axis differs from given ones; the nearest ones first."""
    return _near([one for one in conditions if symbol in one.symbols], sizes, symbol, True)


def _near(conditions: Collection[SizeCondition], sizes: Sizes, symbol: str, holds: bool) -> list[dict[str, int]]:
    """Sizes in which an axis has another size, one for which conditions hold or not: above, below, far away in turn."""
    size, values = sizes[symbol], _values(" ".join(one.formula for one in conditions), sizes[symbol])
    held = values[_all_hold(conditions, {**sizes, symbol: values}, len(values)) == holds]
    above, below, far = held[held > size][:_NEAREST], held[held < size][::-1][:_NEAREST], held[held > 2 * size][:1]
    chosen = (one for row in itertools.zip_longest(above, below, far) for one in row if one is not None)
    return [{**sizes, symbol: int(one)} for one in dict.fromkeys(chosen)]


def follows(condition: SizeCondition, others: Collection[SizeCondition]) -> bool:
    """Whether a condition of one axis holds wherever others of the same axis do."""
    values = _values(" ".join(one.formula for one in (condition, *others)))
    sizes = {condition.symbols[0]: values}
    return not (_all_hold(others, sizes, len(values)) & ~_all_hold([condition], sizes, len(values))).any()


_NEAREST = 8
"""How many sizes on each side of the given one are looked at."""
_DENSE, _LONGEST = 4096, 2000
"""All sizes up to the first are looked at, and above it those near the numbers of a formula. The second is the most
characters of a formula."""


def _all_hold(conditions: Collection[SizeCondition], sizes: Mapping[str, Any], count: int) -> Any:
    held = (np.broadcast_to(np.asarray(one.holds(sizes), dtype=bool), (count,)) for one in conditions)
    return reduce(np.logical_and, held, np.ones(count, dtype=bool))


@cache
def _values(formula: str, size: int = 1) -> Any:
    """Sizes at which a formula may change, in order: small ones, and those near its numbers and their products."""
    numbers = {size, *(int(text) for text in re.findall(r"\b\d{1,9}\b", formula))}
    pairs = {a * b for a in numbers for b in numbers} | {a // b for a in numbers for b in numbers if b}
    some = {near for one in numbers | pairs for near in range(one - 2, one + 3) if _DENSE < near < 2**31}
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
    if re.fullmatch(rf"{name} (<|<=|>|>=|==|!=) \d+|{name} % \d+ (==|!=) \d+", formula):
        return formula
    return _as_interval(name, values, held) or _as_remainder(name, values, held) or formula


def _as_interval(name: str, values: Any, held: Any) -> str:
    """The comparison of a size that holds for the same ones of these values; empty if there is none."""
    right, wrong = values[held], values[~held]
    if right.size and len(right) == right[-1] - right[0] + 1 and right[-1] < values[-1]:
        low, high = right[0], right[-1]
        return f"{name} == {low}" if low == high else f"{low} <= {name} <= {high}" if low > 1 else f"{name} <= {high}"
    if len(wrong) == 1:
        return f"{name} != {wrong[0]}" if wrong[0] > 1 else f"{name} > 1"
    if right.size and held[np.argmax(held) :].all():
        return f"{name} >= {right[0]}"
    return f"{name} <= {wrong[0] - 1}" if right.size and wrong[0] - right[-1] == 1 else ""


def _as_remainder(name: str, values: Any, held: Any) -> str:
    """The comparison of a size's remainder that holds for the same ones of these values; empty if there is none."""
    right, dense = values[held], held[:_DENSE]
    for period in range(2, _DENSE // 4):
        if (dense[period:] == dense[:-period]).all():
            residues = {int(one) % period for one in right[right <= period]}
            if len(residues) == 1:
                return f"{name} % {period} == {residues.pop()}"
            if len(residues) == period - 1:
                return f"{name} % {period} != {(set(range(period)) - residues).pop()}"
            break
    return ""


def _always_holds(condition: SizeCondition) -> bool:
    """Whether a condition of several axes holds for all of many sizes that are drawn."""
    values, draw = _values(condition.formula), np.random.default_rng(0)
    sizes = {
        name: np.concatenate([draw.choice(values, _DRAWN), draw.integers(1, 64, _DRAWN)]) for name in condition.symbols
    }
    return bool(_all_hold([condition], sizes, 2 * _DRAWN).all())


_DRAWN = 5000


@cache
def _symbols(formula: str) -> tuple[str, ...]:
    try:
        names = (node.id for node in ast.walk(ast.parse(formula, mode="eval")) if isinstance(node, ast.Name))
        return tuple(dict.fromkeys(name for name in names if name not in _FUNCTIONS and name != "math"))
    except (SyntaxError, ValueError, RecursionError):
        return ()


@cache
def _compiled(formula: str) -> Any:
    """The code of a formula, in which arithmetic is that of NumPy.

    Raises:
        TypeError: It has something that formulas do not have.
        SyntaxError: It is not one.
    """
    body = _of_numpy(ast.parse(formula, mode="eval").body)
    return compile(ast.fix_missing_locations(ast.Expression(body)), "<formula>", "eval")


def _of_numpy(node: ast.expr) -> ast.expr:
    """A formula made of nothing but calls of known functions, numbers and names of axes."""

    def call(name: str, *nodes: ast.expr) -> ast.expr:
        return ast.Call(ast.Name(f"_{name}", ast.Load()), list(nodes), [])

    match node:
        case ast.Constant(value=int() | float()) | ast.Name():
            return node
        case ast.UnaryOp():
            return call(type(node.op).__name__, _of_numpy(node.operand))
        case ast.BinOp():
            return call(type(node.op).__name__, _of_numpy(node.left), _of_numpy(node.right))
        case ast.BoolOp():
            return reduce(partial(call, type(node.op).__name__), map(_of_numpy, node.values))
        case ast.Compare():
            terms = [_of_numpy(one) for one in (node.left, *node.comparators)]
            pairs = [call(type(op).__name__, *terms[index : index + 2]) for index, op in enumerate(node.ops)]
            return reduce(partial(call, "And"), pairs)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(value=ast.Name(id="math"), attr=name), keywords=[]) if (
            name in _FUNCTIONS and node.args
        ):
            arguments = [_of_numpy(one) for one in node.args]
            return reduce(partial(call, name), arguments) if len(arguments) > 1 else call(name, arguments[0])
    raise TypeError(f"formulas do not have {ast.dump(node)}")


def _power(base: Any, exponent: Any) -> Any:
    if np.max(exponent) > _HIGHEST_POWER:
        raise ValueError
    return base**exponent


_HIGHEST_POWER = 8
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "min": np.minimum, "max": np.maximum, "abs": np.abs, "float": np.asarray, "int": np.trunc, "ceil": np.ceil,
    "floor": np.floor, "trunc": np.trunc, "sqrt": np.sqrt, "round": np.round,
}  # fmt: skip
_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "Add": operator.add, "Sub": operator.sub, "Mult": operator.mul, "FloorDiv": operator.floordiv,
    "Div": operator.truediv, "Mod": operator.mod, "Pow": _power, "USub": operator.neg, "Not": np.logical_not,
    "And": np.logical_and, "Or": np.logical_or, "Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt,
    "GtE": operator.ge, "Eq": operator.eq, "NotEq": operator.ne,
}  # fmt: skip
_KNOWN = {"__builtins__": {}, **{f"_{name}": one for name, one in (*_FUNCTIONS.items(), *_OPERATORS.items())}}


def told_of_conditions(conditions: Sequence[ValidIf]) -> str:
    """``valid for n < 24, h % 4 == 0``"""
    return f"valid for {', '.join(one.formula for one in conditions)}"


def told_with_line(condition: ValidIf) -> str:
    """``n < 24 (net.py:12 decides by it: `if n >= 24:`)``"""
    line = f" ({condition.where} decides by it: `{condition.source}`)" if condition.where else ""
    return f"{condition.formula}{line}"

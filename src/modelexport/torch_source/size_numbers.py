"""What a file computes from sizes of tensors, as Python numbers: ``x.shape[1]``, ``x.shape[1] * 2``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from modelexport.torch_source.expressions import (
    ATOM,
    COMPARISON,
    LOWEST,
    NOT,
    PRODUCT,
    SUM,
    UNARY,
    Expression,
    Number,
    Numbers,
)

MOST = 64
"""Of how many numbers a constant may consist that is written as these."""


def constant_numbers(array: Any) -> Numbers | None:
    """A constant as numbers, if it has at most one axis and few elements."""
    if array is None or array.ndim > 1 or array.size > MOST or array.dtype.kind not in "iufb":
        return None
    return Numbers(tuple(Number.of(value) for value in array.reshape(-1).tolist()), array.ndim == 0)


def _binary(sign: str, binding: int, known: Callable[[Any, Any], Any]) -> Callable[[Number, Number], Number]:
    right = binding if sign in "+*" else binding + 1
    left = binding + 1 if binding == COMPARISON else binding

    def compute(a: Number, b: Number) -> Number:
        if a.literal is not None and b.literal is not None:
            return Number.of(known(a.literal, b.literal))
        if (sign, b.literal) in (("+", 0), ("-", 0), ("*", 1), ("//", 1)):
            return a
        if (sign, a.literal) in (("+", 0), ("*", 1)):
            return b
        text = f"{a.expression.within(left)} {sign} {b.expression.within(right)}"
        return Number(Expression(text, binding), sign not in ("-", "%") and a.is_positive and b.is_positive)

    return compute


_TRUTH: dict[str, Any] = {"Equal": ("==", lambda a, b: a == b), "Less": ("<", lambda a, b: a < b),
                          "Greater": (">", lambda a, b: a > b), "LessOrEqual": ("<=", lambda a, b: a <= b),
                          "GreaterOrEqual": (">=", lambda a, b: a >= b)}  # fmt: skip
_PAIRS: dict[str, Callable[[Number, Number], Number]] = {
    "Add": _binary("+", SUM, lambda a, b: a + b),
    "Sub": _binary("-", SUM, lambda a, b: a - b),
    "Mul": _binary("*", PRODUCT, lambda a, b: a * b),
    "Mod": _binary("%", PRODUCT, lambda a, b: a % b),
    **{name: _binary(sign, COMPARISON, known) for name, (sign, known) in _TRUTH.items()},
}
_QUOTIENTS = {
    True: _binary("//", PRODUCT, lambda a, b: a // b),
    False: _binary("/", PRODUCT, lambda a, b: a / b),
}


def _function(name: str) -> Callable[..., Number]:
    def compute(*numbers: Number) -> Number:
        return Number(
            Expression(f"{name}({', '.join(number.text for number in numbers)})"),
            all(number.is_positive for number in numbers),
        )

    return compute


def _negative(number: Number) -> Number:
    if number.literal is not None:
        return Number.of(-number.literal)
    return Number(Expression(f"-{number.expression.within(UNARY)}", UNARY))


_SINGLE: dict[str, Callable[[Number], Number]] = {
    "Neg": _negative,
    "Not": lambda n: Number(Expression(f"not {n.expression.within(NOT)}", NOT)),
    "Abs": _function("abs"),
    "Sqrt": _function("math.sqrt"),
    "Floor": lambda n: Number(Expression(f"float(math.floor({n.text}))"), n.is_positive),
    "Ceil": lambda n: Number(Expression(f"float(math.ceil({n.text}))"), n.is_positive),
    "Identity": lambda n: n,
}


def computed_numbers(
    operator: str, inputs: Sequence[Numbers | None], attributes: dict[str, Any], kinds: Sequence[str]
) -> Numbers | None:
    """The result of an operator on numbers; ``None`` if it has to be computed with tensors.

    Args:
        kinds: NumPy's kind (``i``, ``f``, ``b``) of each input's type, and of the output's as last.
    """
    if not inputs or inputs[0] is None:
        return None
    first, others = inputs[0], inputs[1:]
    given: list[Numbers] = [each for each in inputs if each is not None]
    if operator in _SINGLE:
        return Numbers(tuple(map(_SINGLE[operator], first.items)), first.is_scalar)
    if operator == "Cast":
        return _cast(first, kinds[0], kinds[-1])
    if operator in _PAIRS or operator in ("Div", "Max", "Min", "Where"):
        return _elementwise(operator, given, kinds) if len(given) == len(inputs) else None
    if operator == "ReduceProd" and all(other is not None for other in others):
        total = Number.of(1)
        for item in first.items:
            total = _PAIRS["Mul"](total, item)
        return Numbers((total,), not attributes.get("keepdims", 1))
    known = [_literals(other) for other in others]
    if operator == "Concat" and len(given) == len(inputs) and not any(each.is_scalar for each in given):
        return Numbers(tuple(item for each in given for item in each.items), False)
    if operator in ("Squeeze", "Unsqueeze", "Reshape"):
        return _reshaped(operator, first, known)
    if operator == "Gather" and others and known[0] is not None and others[0] is not None and not first.is_scalar:
        return Numbers(tuple(first.items[int(place)] for place in known[0]), others[0].is_scalar)
    if operator == "Slice" and not first.is_scalar and all(each is not None for each in known):
        starts, ends, *rest = [each for each in known if each is not None]
        step = rest[1][0] if len(rest) > 1 else 1
        begin, end, step = slice(int(starts[0]), int(ends[0]), int(step)).indices(len(first.items))
        return Numbers(tuple(first.items[place] for place in range(begin, end, step)), False)
    return None


def _literals(numbers: Numbers | None) -> list[Any] | None:
    values = [item.literal for item in numbers.items] if numbers is not None else [None]
    return None if any(value is None for value in values) else values


def _reshaped(operator: str, first: Numbers, known: Sequence[list[Any] | None]) -> Numbers | None:
    axes = known[0] if known else []
    if axes is None or (operator == "Reshape" and len(axes) > 1) or (operator == "Unsqueeze" and not first.is_scalar):
        return None
    scalar = len(axes) == 0 if operator == "Reshape" else operator == "Squeeze"
    return Numbers(first.items, scalar) if not scalar or len(first.items) == 1 else None


def _cast(first: Numbers, before: str, after: str) -> Numbers | None:
    name = {"f": "float", "i": "int", "u": "int", "b": "bool"}.get(after)
    if name is None:
        return None
    if before == after:
        return first
    kind: Any = {"float": float, "int": int, "bool": bool}[name]
    items = [
        Number.of(kind(item.literal)) if item.literal is not None and math.isfinite(item.literal)
        else Number(Expression(f"{name}({item.text})", ATOM), item.is_positive)
        for item in first.items
    ]  # fmt: skip
    return Numbers(tuple(items), first.is_scalar)


def _elementwise(operator: str, given: Sequence[Numbers], kinds: Sequence[str]) -> Numbers | None:
    count = max(len(each.items) for each in given)
    if any(len(each.items) not in (1, count) for each in given):
        return None
    rows = [[each.items[place % len(each.items)] for each in given] for place in range(count)]
    items = [_one(operator, row, kinds) for row in rows]
    if any(item is None for item in items):
        return None
    return Numbers(tuple(item for item in items if item is not None), all(each.is_scalar for each in given))


def _one(operator: str, row: Sequence[Number], kinds: Sequence[str]) -> Number | None:
    if operator == "Where":
        condition, yes, no = row
        if condition.literal is not None:
            return yes if condition.literal else no
        text = f"{yes.expression.within(NOT)} if {condition.expression.within(NOT)} else {no.expression.within(NOT)}"
        return Number(Expression(text, LOWEST), yes.is_positive and no.is_positive)
    if operator in ("Max", "Min"):
        if all(number.literal is not None for number in row):
            return Number.of((max if operator == "Max" else min)(number.literal for number in row))
        return _function(operator.lower())(*row) if len(row) > 1 else row[0]
    if operator == "Div":
        whole = kinds[0] in "iu"
        if whole and not all(number.is_positive for number in row):
            return None
        return _QUOTIENTS[whole](*row)
    return _PAIRS[operator](*row)


def kind_of(dtype: Any) -> str:
    """NumPy's kind of an element type: ``i``, ``u``, ``f`` or ``b``."""
    if dtype is None or dtype.name in ("UNDEFINED", "STRING"):
        return "O"
    found = np.dtype(dtype.numpy()).kind
    return "f" if dtype.is_floating_point() else str(found)

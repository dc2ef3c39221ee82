"""Formulas of sizes: the names in them, and what they give for numbers and for arrays. Text is never executed.

A formula is Python: numbers, names, ``+ - * // / % **``, comparisons, ``and or not``, ``min``, ``max``, ``abs`` and
``math.ceil``, ``math.floor``, ``math.trunc``, ``math.sqrt``, also as SymPy writes them. Nothing else is evaluated.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from fractions import Fraction
from functools import cache, reduce
from types import CodeType
from typing import Any

import numpy as np

from modelexport.core.limits import FORMULA_CHARACTERS, SIZE_DIGITS

SIZE_LIMIT = 10**SIZE_DIGITS
_NAME = re.compile(r"(?=.*[-/] ?[A-Za-z_])[A-Za-z_]\w*([-/] ?\w+)+")
"""Words joined by hyphens or slashes: ``batch-size``, TorchScript's names, or a difference, a quotient of sizes."""
_TRUTH = (ast.Compare, ast.BoolOp, ast.Not)
"""What gives no size, so that a size with it is a name: ``height and width``."""
NOT_EVALUATED = (
    ArithmeticError, LookupError, NameError, ValueError, TypeError, SyntaxError, RecursionError, MemoryError,
)  # fmt: skip
"""The exceptions of evaluating a formula that a file should not have."""


def evaluated(formula: str, sizes: Mapping[str, Any], *, exact: bool = False) -> Any:
    """The number or the truth that a formula gives for sizes, or for arrays of sizes.

    Args:
        exact: Compute with fractions, which the sizes then are: ``floor(n/3 - 1/3)`` of floats is one too few for 13.

    Raises:
        NOT_EVALUATED: It is not a formula, or a name has no size.
    """
    with np.errstate(all="ignore"):
        known = _EXACT if exact else _KNOWN
        return eval(_compiled(formula), known, {name: sizes[name] for name in names_in(formula)})


def evaluated_size(text: str, sizes: Mapping[str, int]) -> int | None:
    """A size as a number; ``None`` if a symbol in it has no size, or it is not a size."""
    if text in sizes:
        return sizes[text]
    try:
        names = names_in(text) if len(text) <= FORMULA_CHARACTERS else (text,)
        number = evaluated(text, {name: Fraction(sizes[name]) for name in names}, exact=True)
        is_size = type(number) is not bool and number == int(number) and 0 <= number < SIZE_LIMIT
        return int(number) if is_size else None
    except NOT_EVALUATED:
        return None


def symbols_in(text: str, declared: Collection[str] = ()) -> list[str]:
    """The symbols in a size: a name, or those of a formula.

    Args:
        declared: The names that are sizes of other axes: ``q-len`` is a difference if ``q`` and ``len`` are among them.
    """
    try:
        if len(text) > FORMULA_CHARACTERS or text.isidentifier():
            return [text]
        _compiled(text)
        if any(isinstance(node, _TRUTH) for node in ast.walk(ast.parse(text, mode="eval"))):
            return [text]
    except NOT_EVALUATED:
        return [text]
    names = [*names_in(text)]
    return [text] if _NAME.fullmatch(text) and not {*declared}.issuperset(names) else names


def symbols_of(texts: Collection[str]) -> list[str]:
    """The symbols in the sizes of the axes of one file, each once."""
    declared = {name for text in texts for name in symbols_in(text)}
    return list(dict.fromkeys(name for text in texts for name in symbols_in(text, declared)))


@cache
def names_in(formula: str) -> tuple[str, ...]:
    """The names of axes in a formula; none in a text that is not one."""
    try:
        names = (node.id for node in ast.walk(ast.parse(formula, mode="eval")) if isinstance(node, ast.Name))
        return tuple(dict.fromkeys(name for name in names if name not in _FUNCTIONS and name != "math"))
    except (SyntaxError, ValueError, RecursionError):
        return ()


@cache
def _compiled(formula: str) -> CodeType:
    """The code of a formula, for numbers and for arrays.

    Raises:
        TypeError: It has something that formulas do not have.
        SyntaxError: It is not one.
    """
    body = _OfArrays().visit(ast.parse(formula, mode="eval"))
    return compile(ast.fix_missing_locations(body), "<formula>", "eval")


class _OfArrays(ast.NodeTransformer):
    """Rewrites a formula for arrays, ``a < n < b`` as ``(a < n) & (n < b)``, and refuses everything but arithmetic."""

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        terms = [self.visit(term) for term in (node.left, *node.comparators)]
        pairs = zip(terms, node.ops, terms[1:], strict=False)
        return _joined(ast.BitAnd(), [ast.Compare(left, [op], [right]) for left, op, right in pairs])

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        return _joined(ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr(), map(self.visit, node.values))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        operand = self.visit(node.operand)
        is_not = isinstance(node.op, ast.Not)
        return ast.Compare(operand, [ast.Eq()], [ast.Constant(False)]) if is_not else ast.UnaryOp(node.op, operand)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in _FUNCTIONS or node.keywords:
            raise TypeError(f"formulas do not have {ast.dump(node)}")
        return ast.Call(ast.Name(name, ast.Load()), [self.visit(argument) for argument in node.args], [])

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        if not isinstance(node.op, _OPERATORS):
            raise TypeError(f"formulas do not have {ast.dump(node.op)}")
        left, right = self.visit(node.left), self.visit(node.right)
        if isinstance(node.op, ast.Pow):  # whole numbers would overflow, or have any number of digits
            return ast.Call(ast.Name("pow", ast.Load()), [left, right], [])
        return ast.BinOp(left, node.op, right)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return ast.Call(ast.Name(_NUMBER, ast.Load()), [node], [])
        if not isinstance(node, _PARTS):
            raise TypeError(f"formulas do not have {ast.dump(node)}")
        return super().generic_visit(node)


def _joined(op: ast.operator, terms: Iterable[ast.expr]) -> ast.expr:
    return reduce(lambda first, second: ast.BinOp(first, op, second), terms)


def _power(base: Fraction, exponent: Fraction) -> Any:
    """A power, unless it would be a number that fills the memory."""
    if abs(exponent) > SIZE_DIGITS or abs(base) >= SIZE_LIMIT:
        raise OverflowError("a power that is not a size")
    return base**exponent


_NUMBER = " number"
"""The function of numbers in a formula: a name that no axis has, since it is not one of Python."""
_PARTS = (ast.Expression, ast.Name, ast.Load)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "min": lambda *terms: reduce(np.minimum, terms), "max": lambda *terms: reduce(np.maximum, terms), "abs": np.abs,
    "float": np.asarray, "int": np.trunc, "ceil": np.ceil, "floor": np.floor, "trunc": np.trunc, "sqrt": np.sqrt,
    "round": np.round, "pow": np.float_power, "Min": lambda *terms: reduce(np.minimum, terms),
    "Max": lambda *terms: reduce(np.maximum, terms), "Mod": np.mod, "ceiling": np.ceil,
}  # fmt: skip
_KNOWN = {"__builtins__": {}, **_FUNCTIONS, _NUMBER: lambda number: number}
_EXACT = {**_KNOWN, "pow": _power, _NUMBER: lambda number: Fraction(str(number))}

"""Renaming the symbols in the sizes of a graph's values: numbers, symbols, and sums of them."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping

import onnx_ir as ir

from modelexport.graph.nodes import inputs_and_results

SYMBOL = re.compile(r"[A-Za-z_]\w*")


def put_size(size: str, symbols: Mapping[str, str]) -> int | str:
    """A size with its symbols replaced; an integer if no symbol is left."""
    text = SYMBOL.sub(lambda found: symbols.get(found[0], found[0]), size)
    if text.isdigit():
        return int(text)
    if SYMBOL.search(text) is None:
        try:
            return _number(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError):
            return text
    return text


_OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip


def _number(part: ast.expr) -> int:
    if isinstance(part, ast.Constant) and isinstance(part.value, int):
        return part.value
    if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.USub):
        return -_number(part.operand)
    if isinstance(part, ast.BinOp) and type(part.op) in _OPERATORS:
        return _OPERATORS[type(part.op)](_number(part.left), _number(part.right))
    raise ValueError(f"not a size: {ast.dump(part)}")


def rename_sizes(model: ir.Model, symbols: Mapping[str, str]) -> None:
    """Replace the symbols in the shapes of all values by other names or by numbers, in place."""
    for value in inputs_and_results(model):
        if value.shape is None or all(isinstance(size, int) for size in value.shape):
            continue
        sizes = [size if isinstance(size, int) else size.value for size in value.shape]
        value.shape = ir.Shape([put_size(size, symbols) if isinstance(size, str) else size for size in sizes])


def replace_symbol(model: ir.Model, symbol: str, other: str) -> None:
    """Give a size of the shapes of all values another symbol, in place; sums stay as they are."""
    for value in inputs_and_results(model):
        if value.shape is not None and any(_is(size, symbol) for size in value.shape):
            value.shape = ir.Shape([ir.SymbolicDim(other) if _is(size, symbol) else size for size in value.shape])


def _is(size: int | ir.SymbolicDim, symbol: str) -> bool:
    return isinstance(size, ir.SymbolicDim) and size.value == symbol

"""Renaming the symbols in the sizes of a graph's values: numbers, symbols, and sums of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import onnx_ir as ir

from modelexport.graph.nodes import inputs_and_results, sizes_of
from modelexport.graph.size_formulas import evaluated_size, symbols_in, symbols_of

SYMBOL = re.compile(r"[A-Za-z_]\w*")
_SUM = re.compile(rf"{SYMBOL.pattern}( \+ {SYMBOL.pattern})+")


def put_size(size: str, symbols: Mapping[str, str], declared: Collection[str] = ()) -> int | str:
    """A size with its symbols replaced; an integer if no symbol is left.

    A sum of symbols is in the order of their names: a capture has an order of its own, which differs between models.

    Args:
        declared: Other symbols, which are not replaced.
    """
    text = symbols.get(size, size)
    if size not in symbols and symbols_in(size, {*symbols, *declared}) != [size]:
        text = SYMBOL.sub(lambda match: symbols.get(match[0], match[0]), size)
    if _SUM.fullmatch(text) and size not in symbols:
        return " + ".join(sorted(text.split(" + ")))
    if text.isdigit():
        return int(text)
    number = evaluated_size(text, {})
    return text if number is None else number


def rename_sizes(model: ir.Model, symbols: Mapping[str, str]) -> None:
    """Replace the symbols in the shapes of all values by other names or by numbers, in place."""
    declared = symbols_of([size for value in model.graph.inputs for size in sizes_of(value) if isinstance(size, str)])
    for value in inputs_and_results(model):
        if value.shape is None or all(isinstance(size, int) for size in value.shape):
            continue
        sizes = [put_size(size, symbols, declared) if isinstance(size, str) else size for size in sizes_of(value)]
        value.shape = ir.Shape(sizes)


def replace_symbol(model: ir.Model, symbol: str, other: str) -> None:
    """Give a size of the shapes of all values another symbol, in place; sums stay as they are."""
    for value in inputs_and_results(model):
        if value.shape is not None and any(_named(size, symbol) for size in value.shape):
            value.shape = ir.Shape([ir.SymbolicDim(other) if _named(size, symbol) else size for size in value.shape])


def _named(size: int | ir.SymbolicDim, symbol: str) -> bool:
    return isinstance(size, ir.SymbolicDim) and size.value == symbol

"""Renaming the symbols in the sizes of a graph's values: numbers, symbols, and sums of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import onnx_ir as ir

from modelexport.graph.nodes import all_nodes

SYMBOL = re.compile(r"[A-Za-z_]\w*")


def put_size(size: str, symbols: Mapping[str, str]) -> int | str:
    """A size with its symbols replaced; an integer if no symbol is left."""
    text = SYMBOL.sub(lambda found: symbols.get(found[0], found[0]), size)
    return int(text) if text.isdigit() else text


def rename_sizes(model: ir.Model, symbols: Mapping[str, str]) -> None:
    """Replace the symbols in the shapes of all values by other names or by numbers, in place."""
    for value in _values(model):
        if value.shape is None or all(isinstance(size, int) for size in value.shape):
            continue
        sizes = [size if isinstance(size, int) else size.value for size in value.shape]
        value.shape = ir.Shape([put_size(size, symbols) if isinstance(size, str) else size for size in sizes])


def _values(model: ir.Model) -> Iterator[ir.Value]:
    for graph in model.graphs():
        yield from graph.inputs
    for node in all_nodes(model):
        yield from node.outputs

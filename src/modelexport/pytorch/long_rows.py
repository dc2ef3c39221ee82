"""Inputs so long that bounds on positions show: a window of 48 tokens is one of 96 for all shorter sequences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from modelexport.graph.nodes import READ_SIZES_ONLY
from modelexport.pytorch.other_sizes import long_row, symbol_sizes
from modelexport.pytorch.values import tensors_in

Inputs = Mapping[str, Any] | Sequence[Any]


def beyond_bounds(inputs: Inputs, model: ir.Model, tried: Sequence[Inputs]) -> Iterator[tuple[str, Inputs]]:
    """A single row with sizes beyond the numbers that a file compares positions with, with a description.

    What is compared may be a quotient or a logarithm of positions, so sizes far beyond come first; a model may refuse
    them. There are none where the row would take much longer than the example.

    Args:
        tried: Other inputs that show what is up to their sizes.
    """
    bounds = [bound for bound in _bounds(model.graph) if bound < _LONGEST]
    tried_sizes = [size for one in (inputs, *tried) for size in symbol_sizes(one, model).values()]
    most = max(_TIMES * _elements(inputs), _ELEMENTS)
    for size in (min(_FAR * max(bounds), _LONGEST), max(bounds) + 2) if bounds and tried_sizes else ():
        row = long_row(inputs, model, size)
        if size > max(tried_sizes) and _elements(inputs) < _elements(row) <= most:
            yield f"one row of size {size}", row


_LONGEST = 1024
"""The largest size: what compares all positions with all takes its square."""
_TIMES = 16
_ELEMENTS = 4096
"""How many elements all inputs may have: so many times those of the example, or so many."""
_FAR = 5
"""A bucket for the logarithm of distances is reached at some times the number of buckets."""


def _elements(inputs: Inputs) -> int:
    return sum(tensor.numel() for _, tensor in tensors_in(inputs))


def _bounds(graph: ir.Graph) -> Iterator[int]:
    """The numbers that a graph compares with what it computes from sizes alone, as positions are."""
    sizes: set[ir.Value] = set()
    for node in graph:
        taken = [value for value in node.inputs if value is not None and value.const_value is None]
        if taken and (node.op_type in READ_SIZES_ONLY or sizes.issuperset(taken)):
            sizes.update(node.outputs)
            constants = (value.const_value for value in node.inputs if value is not None)
            for tensor in constants if node.domain == "" and node.op_type in _COMPARISONS else ():
                bound = float(tensor.numpy().reshape(-1)[0]) if tensor is not None and tensor.size == 1 else 0.0
                if math.isfinite(bound):
                    yield int(abs(bound))


_COMPARISONS = frozenset(
    {"Clip", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "Trilu"}
)

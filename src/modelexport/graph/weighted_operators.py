"""Operators that compute with a weight: which input it is, and which of its axes are those of inputs and of results.

Quantizers, adapters, figures of cost and ``to-torch`` read it. Which operators a method of ``quantize`` takes is in its
row, and which module of PyTorch an operator becomes in the tables of ``to-torch``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import onnx_ir as ir

from modelexport.graph.operator_kinds import RECURRENT


class WeightedOperator(NamedTuple):
    """Positions of inputs, and axes of the weight."""

    weight: int = 1
    summed: int = -2
    """The axis that is summed over."""
    results: tuple[int, ...] = (-1,)
    """The axes along which results differ."""
    bias: int | None = None


_PRODUCT = WeightedOperator()
WEIGHTED: Mapping[tuple[str, str], WeightedOperator] = {
    ("", "MatMul"): _PRODUCT,
    ("com.microsoft", "FusedMatMul"): _PRODUCT,
    ("com.microsoft", "Attention"): _PRODUCT,  # the one of ONNX has no weight
    ("", "Gemm"): WeightedOperator(bias=2),
    ("", "Conv"): WeightedOperator(summed=1, results=(0,), bias=2),
    ("", "ConvTranspose"): WeightedOperator(summed=0, results=(1,), bias=2),
    ("", "Gather"): WeightedOperator(weight=0, summed=-1, results=(0,)),
    **{("", name): WeightedOperator(summed=-1, results=(0, 1)) for name in RECURRENT},
}
"""The domains and types of operators to their rows."""


def row_of(node: ir.Node) -> WeightedOperator | None:
    """The row of a node's operator; ``None`` if it has none."""
    return WEIGHTED.get((node.domain, node.op_type))


def summed_axis(node: ir.Node) -> int:
    """The axis of a node's weight that is summed over; in an operator without a row as in ``MatMul``."""
    return -1 if node.attributes.get_int("transB", 0) else (row_of(node) or _PRODUCT).summed


def result_axes(node: ir.Node) -> tuple[int, ...]:
    """The axes of a node's weight along which its results differ; in an operator without a row as in ``MatMul``."""
    return (0,) if node.attributes.get_int("transB", 0) else (row_of(node) or _PRODUCT).results


def data_of(node: ir.Node) -> ir.Value:
    """What a node multiplies with its weight, or looks up in it."""
    row = row_of(node)
    assert row is not None
    value = node.inputs[1 - row.weight]
    assert value is not None
    return value

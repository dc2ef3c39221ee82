"""A file run node by node by the standard, in its own types: its outputs, and values inside it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.graph.nodes import draws, nested_graphs, values_taken
from modelexport.traces.file_run import FileRun
from modelexport.traces.node_computation import NodeError


@dataclass
class NodeByNode:
    """The values of a file that were asked for, from one run node by node."""

    arrays: dict[ir.Value, Any] = field(default_factory=dict)
    """The values that were asked for, before they were replaced."""
    outputs: Mapping[str, Any] | None = None
    """``None`` if nothing here computes a node."""
    drawn: list[Any] = field(default_factory=list)
    """The random numbers of the run, in the order in which they were drawn."""
    random: set[ir.Value] = field(default_factory=set)
    """The values that depend on random numbers."""
    unlike: set[ir.Value] = field(default_factory=set)
    """The values that depend on random numbers that another file did not draw."""


def run_node_by_node(
    model: ir.Model,
    inputs: Mapping[str, Any],
    wanted: Collection[ir.Value],
    *,
    drawn: Sequence[Any] | None = None,
    replaced: Mapping[ir.Value, Any] = MappingProxyType({}),
) -> NodeByNode:
    """Run a file.

    Args:
        drawn: Random numbers of another file, which this one draws as well: in their order, those of equal shape.
        replaced: Values to the arrays that their users get instead, where they have the same shape.
    """
    result, left = NodeByNode(), defaultdict[tuple[int, ...], list[Any]](list)
    for numbers in drawn or ():
        left[numbers.shape].append(numbers)

    def depends(on: Collection[ir.Value], node: ir.Node) -> bool:
        results = (value for graph in nested_graphs(node) for value in graph.outputs)
        return any(value in on for value in (*values_taken(node), *results))

    def watch(node: ir.Node, inputs: Sequence[Any], value: ir.Value, array: Any) -> Any:
        its_own = draws(node)
        if its_own or depends(result.random, node):
            result.random.add(value)
        if depends(result.unlike, node):
            result.unlike.add(value)
        if not isinstance(array, np.ndarray):  # a sequence
            return array
        if its_own and drawn is None:
            result.drawn.append(array)
        elif its_own and left[array.shape]:
            array = left[array.shape].pop(0).astype(array.dtype)
        elif its_own:
            result.unlike.add(value)
        if value in wanted:
            result.arrays[value] = array
        other = replaced.get(value)
        return other.astype(array.dtype) if other is not None and other.shape == array.shape else array

    with suppress(NodeError):  # ONNX Runtime ran it: what follows is not compared
        result.outputs = FileRun(model, in_float64_for=None).run(inputs, watch)
    return result

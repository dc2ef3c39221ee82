"""The nodes of a file that depend on the random numbers that it draws.

They compute other numbers in each run. A value that happens to be near one of PyTorch's is not therefore that one: a
little noise leaves a value nearly as it was, in the call that adds the noise.
"""

from __future__ import annotations

import onnx_ir as ir

from modelexport.graph.nodes import READ_SIZES_ONLY, all_nodes, nested_graphs
from modelexport.surgery.repeating import values_taken

_DRAWING = frozenset(
    {
        "Bernoulli",
        "Dropout",
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    }
)
"""The operators that draw random numbers; others that ONNX calls not deterministic only may contain such."""


def draws_numbers(model: ir.Model) -> bool:
    """Whether a file has operators that draw random numbers."""
    return any(map(_draws, all_nodes(model)))


def random_nodes(graph: ir.Graph) -> set[ir.Node]:
    """The nodes of a graph that depend on random numbers, by more than the sizes of what they take."""
    found: set[ir.Node] = set()
    for node in graph:
        depends = node.op_type not in READ_SIZES_ONLY and any(value.producer() in found for value in values_taken(node))
        if depends or _draws(node) or any(_draws(inner) for inner in _inside(node)):
            found.add(node)
    return found


def _inside(node: ir.Node) -> list[ir.Node]:
    return [one for graph in nested_graphs(node) for inner in graph for one in (inner, *_inside(inner))]


def _draws(node: ir.Node) -> bool:
    if node.domain != "" or node.op_type not in _DRAWING:
        return False
    return node.op_type != "Dropout" or not _is_false(node.inputs[2] if len(node.inputs) > 2 else None)


def _is_false(mode: ir.Value | None) -> bool:
    """Whether a ``Dropout`` passes on what it takes."""
    tensor = ir.convenience.get_const_tensor(mode) if mode is not None else None
    return mode is None or (tensor is not None and not bool(tensor.numpy()))

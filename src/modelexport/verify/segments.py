"""Cuts a graph at the boundaries of its modules, so that each module computes from the right inputs.

At each boundary value the graph is cut in two: its producer still computes it, and its users take it from a new input.
These inputs get the values of the PyTorch run. So every segment between two boundaries is computed independently, and
an error shows only where it originates, all in one run of one model.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir
import onnx_ir.passes.common as passes

from modelexport.graph.owners import owner_of

GIVEN = ".given"
"""Appended to the name of a boundary value: the name of the input from which its users take it."""


def segmented(model: ir.Model, boundaries: Collection[str], wanted: Collection[str]) -> ir.Model:
    """A copy of a model, sharing its tensors, cut at ``boundaries`` and computing ``wanted``.

    Args:
        boundaries: Names of values of the main graph. Those that are inputs of the graph stay inputs.
        wanted: The boundaries to compute: the outputs of the copy.

    Returns:
        A model whose inputs are the inputs of the graph and, named ``NAME.given``, the boundaries that are needed.
    """
    copy = model.clone()
    made = {value.name: value for node in copy.graph for value in node.outputs}
    copy.graph.outputs.clear()
    for name in boundaries:
        value = made.get(name)
        if value is None:
            continue
        given = ir.Value(name=f"{name}{GIVEN}", type=value.type, shape=value.shape)
        value.replace_all_uses_with(given)
        copy.graph.inputs.append(given)
    copy.graph.outputs.extend(made[name] for name in wanted if name in made)
    passes.RemoveUnusedNodesPass()(copy)
    for value in list(copy.graph.inputs):
        if not value.uses():
            copy.graph.inputs.remove(value)
    return copy


def owners_between(node: ir.Node, boundaries: Collection[str]) -> set[str]:
    """Addresses of the calls whose nodes are between ``boundaries`` and a node's outputs, with those of the node."""
    found: set[str] = set()
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        owner = owner_of(current)
        found |= {owner.call.address} if owner is not None else set()
        for value in current.inputs:
            producer = value.producer() if value is not None and value.name not in boundaries else None
            if producer is not None and producer not in seen:
                seen.add(producer)
                pending.append(producer)
    return found

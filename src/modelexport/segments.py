"""A graph cut at the borders of its modules, so that each module computes from the right inputs.

At each border value the graph is cut in two: what made it computes it still, and what uses it takes it from a new
input. Fed with the values of the PyTorch run, every stretch between two borders is computed once and on its own, and an
error shows where it is made and nowhere else, all in one run of one model.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir
import onnx_ir.passes.common as passes

GIVEN = ".given"
"""Behind the name of a border value: the input that its users take it from."""


def segmented(model: ir.Model, borders: Collection[str], wanted: Collection[str]) -> ir.Model:
    """A copy of a model, sharing its tensors, cut at ``borders`` and computing ``wanted``.

    Args:
        borders: Names of values of the main graph. Those that are inputs of the graph stay inputs.
        wanted: The borders to compute: the outputs of the copy.

    Returns:
        A model whose inputs are the inputs of the graph and, named ``NAME.given``, the borders that are needed.
    """
    copy = model.clone()
    made = {value.name: value for node in copy.graph for value in node.outputs}
    copy.graph.outputs.clear()
    for name in borders:
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

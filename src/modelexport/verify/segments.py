"""Cuts a graph at the boundaries of its modules, so that each module computes from the right inputs.

At each boundary value the graph is cut in two: its producer still computes it, and its users take it from a new input.
These inputs get the values of the PyTorch run. So every segment between two boundaries is computed independently, and
an error shows only where it originates, all in one run of one model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.graph.copies import copy_of
from modelexport.graph.owners import owner_of
from modelexport.surgery.repeating import values_taken

GIVEN = ".given"
"""Appended to the name of a boundary value: the name of the input from which its users take it."""


def given_name(name: str) -> str:
    """The name of the input that the users of a boundary value take it from."""
    return f"{name}{GIVEN}"


def segmented(
    model: ir.Model,
    boundaries: Collection[str],
    wanted: Collection[str],
    dtypes: Mapping[str, Any] | None = None,
) -> ir.Model:
    """A copy of a model, sharing its tensors, cut at ``boundaries`` and computing ``wanted``.

    Args:
        boundaries: Names of values of the main graph. Those that are inputs of the graph stay inputs.
        wanted: What to compute, boundaries or values between them: the outputs of the copy.
        dtypes: NumPy's element types of boundaries; other tools leave values without types, an input has to have one.

    Returns:
        A model whose inputs are the inputs of the graph and, named ``NAME.given``, the boundaries that are needed.
    """
    made = {value.name or "": node for node in model.graph for value in node.outputs}
    cut = {name for name in boundaries if name in made}
    needed = nodes_before([made[name] for name in wanted if name in made], cut)
    # To copy all nodes and to remove most of them again takes as long as to run the rest.
    return stretch(model, [node for node in model.graph if node in needed], cut, wanted, dtypes or {})


def nodes_before(nodes: Iterable[ir.Node], boundaries: Collection[str]) -> dict[ir.Node, None]:
    """The nodes that compute between ``boundaries`` and what some nodes give, these included."""
    found = dict.fromkeys(nodes)
    pending = list(found)
    while pending:
        for value in values_taken(pending.pop()):
            producer = value.producer() if value.name not in boundaries else None
            if producer is not None and producer not in found:
                found[producer] = None
                pending.append(producer)
    return found


def stretch(
    model: ir.Model,
    nodes: Collection[ir.Node],
    boundaries: Collection[str],
    wanted: Collection[str],
    dtypes: Mapping[str, Any],
) -> ir.Model:
    """As :func:`segmented`, with nothing but some nodes.

    Args:
        nodes: Nodes of the main graph, in its order. What they take is made by them, is a boundary, or of the graph.
    """
    made = {value: value.name for node in nodes for value in node.outputs}
    named = {name: value for value, name in made.items()}
    taken = dict.fromkeys(value for node in nodes for value in values_taken(node))
    entering = [value for value in taken if value not in made]
    graph = ir.GraphView(
        [value for value in entering if not value.is_initializer() or value.is_graph_input()],
        [named[name] for name in wanted if name in named],
        nodes=nodes,
        initializers=[value for value in entering if value.is_initializer()],
        opset_imports=dict(model.graph.opset_imports),
        name=model.graph.name,
    )
    copy = ir.Model(copy_of(graph), ir_version=model.ir_version, functions=list(model.functions.values()))
    inputs, outputs = list(copy.graph.inputs), list(copy.graph.outputs)
    copy.graph.outputs.clear()  # what is given to its users is returned as it is computed
    inside = [value for node in copy.graph for value in node.outputs if value.name in boundaries and value.uses()]
    for value in (*inputs, *inside):
        if value.name in boundaries:
            given = _given(value, dtypes)
            value.replace_all_uses_with(given)
            copy.graph.inputs.append(given)
            if value in inputs:
                copy.graph.inputs.remove(value)
    copy.graph.outputs.extend(outputs)
    return copy


def _given(value: ir.Value, dtypes: Mapping[str, Any]) -> ir.Value:
    """An input from which the users of a value can take it."""
    name, kind = value.name or "", value.type
    if kind is None and name in dtypes:
        kind = ir.TensorType(ir.DataType.from_numpy(np.dtype(dtypes[name])))
    return ir.Value(name=given_name(name), type=kind, shape=value.shape)


def owners_between(node: ir.Node, boundaries: Collection[str]) -> set[str]:
    """Addresses of the calls whose nodes are between ``boundaries`` and a node's outputs, with those of the node."""
    owners = (owner_of(one) for one in nodes_before([node], boundaries))
    return {owner.call.address for owner in owners if owner is not None}

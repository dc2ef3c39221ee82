"""Which values enter and leave the nodes of each call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from modelexport.core import CallTree, ModuleCall
from modelexport.graph import all_nodes, nested_graphs, owner_of


@dataclass
class CallBoundary:
    """The values at the border of a call's nodes, those of the calls inside it included. Initializers do not count."""

    inputs: dict[ir.Value, None] = field(default_factory=dict)
    outputs: dict[ir.Value, None] = field(default_factory=dict)


def boundaries(model: ir.Model, calls: CallTree) -> Mapping[ModuleCall, CallBoundary]:
    """The boundary of every call, in one walk over the edges; a call without nodes has an empty one."""
    found = {traced.call: CallBoundary() for traced in calls}
    stacks = {traced.call: calls.stack(traced.call) for traced in calls}
    inside: dict[ir.Node, dict[ModuleCall, None]] = {}
    holders: dict[ir.Graph, ir.Node] = {}
    for node in all_nodes(model):
        owner = owner_of(node)
        assert owner is not None
        inside[node] = dict.fromkeys(call for owned in owner.calls for call in stacks[owned])
        holders.update((graph, node) for graph in nested_graphs(node))
    nowhere: dict[ModuleCall, None] = {}
    for node, users in inside.items():
        for value in node.inputs:
            if value is None or value.is_initializer():
                continue
            producer = value.producer()
            makers = inside[producer] if producer is not None else nowhere
            for call in _only(users, makers):
                found[call].inputs[value] = None
            for call in _only(makers, users):
                found[call].outputs[value] = None
    for graph in model.graphs():
        holder = holders.get(graph)
        outside = inside[holder] if holder is not None else nowhere
        for value in graph.outputs:
            producer = value.producer()
            for call in _only(inside[producer] if producer is not None else nowhere, outside):
                found[call].outputs[value] = None
    return found


def _only(some: Mapping[ModuleCall, None], others: Mapping[ModuleCall, None]) -> Iterable[ModuleCall]:
    return (call for call in some if call not in others)

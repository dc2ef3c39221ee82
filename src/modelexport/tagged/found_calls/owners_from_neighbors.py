"""Owners of the nodes of which nothing is recorded: the nearest call that all nodes around them are in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from modelexport.core.calls import ROOT, CallTree, ModuleCall, common_stack
from modelexport.core.owners import Evidence, Owner
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import all_nodes, enclosing_nodes, nested_graphs, values_taken


def infer_owners(model: ir.Model, calls: CallTree) -> int:
    """Assign every node without an owner the nearest call around its neighbors; returns the number of such nodes.

    The neighbors are the nearest nodes with an owner before it and behind it, along every path. An output of the graph
    is a neighbor in the root call, an input of the graph is none. A node in a branch or a loop belongs to the call of
    its enclosing node or to one within it; a node without neighbors, to the root call: it is part of the whole.
    """
    nodes = list(all_nodes(model))
    unowned = [node for node in nodes if owner_of(node) is None]
    if not unowned:
        return 0

    def nearest(several: Iterable[ModuleCall | None]) -> ModuleCall | None:
        """The nearest call that several calls are in."""
        stacks = [calls.stack(call) for call in {*several} if call is not None]
        return common_stack(stacks)[-1] if stacks else None

    before: dict[ir.Node, ModuleCall | None] = {}
    behind: dict[ir.Node, ModuleCall | None] = {}
    enclosing = enclosing_nodes(nodes)
    in_functions = (node for function in model.functions.values() for node in _inner_first(function))
    order = [*_inner_first(model.graph), *in_functions]
    for node in order:
        makers = (value.producer() for value in values_taken(node))
        before[node] = _owned(node) or nearest(before.get(maker) for maker in makers if maker is not None)
    for node in reversed(order):
        behind[node] = _owned(node) or nearest(_users(node, enclosing, behind))
    for node in nodes:  # an enclosing node comes before the nodes in it
        if owner_of(node) is None:
            around = enclosing.get(node.graph) if isinstance(node.graph, ir.Graph) else None
            enclosing_call = (_owned(around) if around is not None else None) or ROOT
            call = nearest((before[node], behind[node])) or enclosing_call
            is_within = nearest((call, enclosing_call)) == enclosing_call
            set_owner(node, Owner((call if is_within else enclosing_call,), Evidence.INFERRED))
    return len(unowned)


def _owned(node: ir.Node) -> ModuleCall | None:
    owner = owner_of(node)
    return None if owner is None else owner.call


def _inner_first(graph: ir.Graph | ir.Function) -> Iterator[ir.Node]:
    """The nodes of a graph in its order, those of nested graphs before their enclosing node."""
    for node in graph:
        for nested in nested_graphs(node):
            yield from _inner_first(nested)
        yield node


def _users(
    node: ir.Node, enclosing: dict[ir.Graph, ir.Node], behind: dict[ir.Node, ModuleCall | None]
) -> Iterable[ModuleCall | None]:
    for value in node.outputs:
        for user, _ in value.uses():
            yield behind.get(user)
        if value.is_graph_output():
            around = enclosing.get(value.graph)  # type: ignore[arg-type]  # a graph's output is in a graph
            yield ROOT if around is None else behind.get(around)

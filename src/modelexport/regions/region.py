"""A region of a graph: nodes with the values that enter and leave them, in whose place other nodes can be put."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from modelexport.core.owners import Owner
from modelexport.graph.node_owners import set_owner
from modelexport.graph.nodes import values_taken, with_nested
from modelexport.graph.unique_names import free_name, name_new_nodes, names_in


@dataclass(frozen=True)
class Region:
    """Nodes, and the values at their boundary; the nodes of their nested graphs may be among them or not."""

    nodes: Mapping[ir.Node, None]
    inputs: Sequence[ir.Value]
    """The values, without initializers, that the nodes take from others or from the graph's inputs."""
    outputs: Sequence[ir.Value]
    """The values that others take from the nodes, or that the graph returns."""

    @classmethod
    def of(cls, nodes: Iterable[ir.Node]) -> Region:
        """The region of some nodes, in their order."""
        inside = dict.fromkeys(nodes)
        taken = dict.fromkeys(value for node in inside for value in values_taken(node))
        made = (value for node in inside for value in node.outputs)
        return cls(
            inside,
            [value for value in taken if value.producer() not in inside and not value.is_initializer()],
            [v for v in made if v.is_graph_output() or any(user not in inside for user in v.consumers())],
        )

    @classmethod
    def between(cls, outputs: Sequence[ir.Value], is_inside: Callable[[ir.Value], bool]) -> Region:
        """The nodes that compute values, with those nested in them.

        Args:
            is_inside: Whether the node that computes a value is one of them. Weights are not asked about.
        """
        nodes: dict[ir.Node, None] = {}
        taken: dict[ir.Value, None] = {}
        pending = [value for value in outputs if is_inside(value)]
        while pending:
            node = pending.pop().producer()
            if node is None or node in nodes:
                continue
            nodes.update(dict.fromkeys(with_nested(node)))
            for value in values_taken(node):
                if not value.is_initializer():
                    if is_inside(value):
                        pending.append(value)
                    else:
                        taken[value] = None
        return cls(nodes, list(taken), outputs)


def weights_of(nodes: Iterable[ir.Node]) -> dict[ir.Value, None]:
    """The initializers that nodes take, in the order of their first use."""
    return dict.fromkeys(value for node in nodes for value in values_taken(node) if value.is_initializer())


def put(
    model: ir.Model,
    nodes: Sequence[ir.Node],
    results: Sequence[ir.Value],
    region: Region,
    owners: Mapping[ir.Node, Owner | None],
    *,
    weights: Iterable[ir.Value] = (),
    label: str = "",
    names: set[str | None] | None = None,
) -> int:
    """Put new nodes in the place of a region of a model; returns how many nodes of it have gone, with nested ones.

    A node of the region stays if something else uses its values: several calls may own it. The weights go that nothing
    uses any more. The new nodes are inserted behind the region, and the graph is sorted if it is not then.

    Args:
        nodes: The new nodes. They and what they compute get other names if the model has these.
        results: The values that get the users, name, type and shape of the region's outputs, in their order.
        region: Its nodes that are not nested in others of it are in one graph.
        owners: The owners of new nodes, and of those in their nested graphs, that do not have them yet.
        weights: Initializers that the new nodes bring; the caller adds them to the model.
        label: The beginning of names that are changed.
        names: The names in the model, if the caller keeps them for several calls. The new ones are added.

    Raises:
        ValueError: The new nodes take values that are computed from their results.
    """
    graph = next(iter(region.nodes)).graph
    assert isinstance(graph, ir.Graph)
    for node, owner in owners.items():
        set_owner(node, owner)
    behind = [*itertools.takewhile(lambda node: node not in region.nodes, reversed(graph))]
    for old, new in zip(region.outputs, results, strict=True):
        new.type = new.type if old.type is None else old.type
        new.shape = new.shape if old.shape is None else old.shape.copy()
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    made = [each for node in nodes for each in with_nested(node)]
    old_weights, removed = weights_of(region.nodes), _remove(region)
    drop_unused(old_weights)
    there = names_in(model) if names is None else names
    there.update(value.name for value in region.outputs)
    for value in weights:
        if value.name in there and model.graph.initializers.get(value.name or "") is not value:
            value.name = free_name(f"{label}.{value.name}", there)
        there.add(value.name)
    name_new_nodes(made, there, label)
    for old, new in zip(region.outputs, results, strict=True):
        new.name = old.name
        if (maker := old.producer()) is not None and maker.graph is not None:  # it stays, and computes it for others
            old.name = free_name(f"{old.name}_before", there)
    if behind:
        graph.insert_before(behind[-1], nodes)
    else:
        graph.extend(nodes)
    later = set(behind)
    makers = {value.producer() for node in nodes for value in values_taken(node)}
    users = {user for value in results for user in value.consumers()}.difference(made)
    if not later.isdisjoint(makers) or not later.issuperset(users):
        graph.sort()
    return removed


def drop_unused(weights: Iterable[ir.Value]) -> None:
    """Take initializers that nothing uses out of their graph, and out of its inputs if they are such, too."""
    for value in weights:
        if (graph := value.graph) is not None and not value.uses() and not value.is_graph_output():
            if value.is_graph_input():
                graph.inputs.remove(value)
            graph.initializers.pop(value.name or "", None)


def _remove(region: Region) -> int:
    """Remove the nodes of a region whose values nothing uses; returns how many."""
    removed = 0
    for node in reversed([*region.nodes]):
        if node.graph is None or any(value.uses() or value.is_graph_output() for value in node.outputs):
            continue
        _, *nested = with_nested(node)
        for inner in nested:
            for index in range(len(inner.inputs)):
                inner.replace_input_with(index, None)
        node.graph.remove(node, safe=True)
        removed += 1 + len(nested)
    return removed

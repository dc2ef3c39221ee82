"""Owners of nodes: of matched nodes from the nodes that they replace, of new nodes from their neighbors."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.owners import Evidence, Owner
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import IDENTITY, all_nodes, consumers, enclosing_nodes
from modelexport.graph.snapshot import SourceGraph, SourceNode


class LostCalls:
    """Finds the calls of nodes before a value of the source graph that are no longer in the changed graph."""

    def __init__(self, source: SourceGraph, *present: Container[str]) -> None:
        """Prepare the search.

        Args:
            source: The graph before it was changed.
            present: The values of the source graph that the changed graph has: the search stops at such values.
        """
        self._source = source
        self._ends = (*present, source.constant)
        self._found: dict[str, tuple[tuple[ModuleCall, ...], ...]] = {}
        """Value to the owners of each node behind it, equal ones once."""

    def behind(self, names: Iterable[str | None], own_calls: Collection[ModuleCall] = ()) -> dict[ModuleCall, None]:
        """The owners of the source nodes between values that are present and these.

        No node is visited twice, but each lost value keeps all owners behind it: a long lost region of many calls takes
        the product of both.

        Args:
            own_calls: The calls of the asking node. A source node with several calls is left out if one of them is
                among these.
        """
        calls: dict[ModuleCall, None] = {}
        for name in names:
            if name is None or self._ends_at(name):
                continue
            if name not in self._found:
                self._search(name)
            for owners in self._found[name]:
                if len(owners) == 1 or not any(call in own_calls for call in owners):
                    calls.update(dict.fromkeys(owners))
        return calls

    def _ends_at(self, name: str) -> bool:
        for end in self._ends:
            if name in end:
                return True
        return name not in self._source.producer

    def _search(self, name: str) -> None:
        source = self._source
        order: list[str] = []
        pending = [name]
        while pending:
            current = pending.pop()
            if current in self._found or self._ends_at(current):
                continue
            order.append(current)
            self._found[current] = ()
            pending.extend(used for used in source.nodes[source.producer[current]].inputs if used is not None)
        for current in reversed(order):
            node = source.nodes[source.producer[current]]
            # An Identity computes nothing: its calls are not those of the node that it was fused into.
            stacks = dict.fromkeys([node.owner.calls] if node.owner is not None and node.op != IDENTITY else ())
            for used in node.inputs:
                if used is not None:
                    stacks.update(dict.fromkeys(self._found.get(used, ())))
            self._found[current] = tuple(stacks)


def place_unowned(model: ir.Model) -> None:
    """Assign each node without an owner the owners of the nodes that it leads to, or else of those it comes from."""
    nodes = list(all_nodes(model))
    place_new_nodes([node for node in nodes if owner_of(node) is None], enclosing_nodes(nodes))


class DerivedOwners(dict[tuple[tuple[ModuleCall, ...], str], Owner]):
    """Calls and a line of code to their derived owner, which is one object for all of its nodes."""

    def __missing__(self, key: tuple[tuple[ModuleCall, ...], str]) -> Owner:
        calls, line = key
        owner = self[key] = Owner(calls, Evidence.DERIVED, line)
        return owner


def owner_of_replaced(
    replaced: Sequence[SourceNode], behind: Sequence[Collection[ModuleCall]], derived: DerivedOwners, *, same: bool
) -> Owner | None:
    """The owner of a node that replaces nodes of the source graph.

    Args:
        behind: For each of them, the calls of the lost nodes before it that the node replaces, too.
        same: Whether it has the operator of the first, and is not a variant of it.
    """
    if same and len(replaced) == 1 and not any(behind):
        return replaced[0].owner
    owners = [before.owner for before in replaced if before.owner is not None]
    calls = dict.fromkeys(chain(*(owner.calls for owner in owners), *behind))
    return derived[tuple(calls), owners[0].line if owners else ""] if calls else None


def complete_owners(
    nodes: Sequence[ir.Node], new: Sequence[ir.Node], enclosing: Mapping[ir.Graph, ir.Node], derived: DerivedOwners
) -> None:
    """Assign owners to the nodes that replace none, and to those whose source nodes had none, then lines to all."""
    place_new_nodes(new, enclosing, derived)
    infer_from_neighbors(nodes, enclosing)
    complete_lines(nodes, enclosing)


def place_new_nodes(
    new: Sequence[ir.Node], enclosing: Mapping[ir.Graph, ir.Node], derived: DerivedOwners | None = None
) -> None:
    """Assign new nodes the owners of the nodes that they lead to, or else of those they come from (``derived``)."""
    owners = DerivedOwners() if derived is None else derived
    leads: dict[ir.Node, tuple[ModuleCall, ...]] = {}
    for node in reversed(new):
        leads[node] = _calls_of(consumers(node, enclosing), leads)
    for node in new:
        leads[node] = leads[node] or _calls_of(node.predecessors(), leads)
        if leads[node]:
            set_owner(node, owners[leads[node], ""])


def infer_from_neighbors(nodes: Iterable[ir.Node], enclosing: Mapping[ir.Graph, ir.Node]) -> None:
    """Assign each node without an owner the call of its neighbors if all that have one agree (``inferred``)."""
    forwards = list(nodes)
    for node in (*forwards, *reversed(forwards)):  # a constant comes before the node that tells
        if owner_of(node) is None:
            around = _calls_of([*node.predecessors(), *consumers(node, enclosing)], {})
            if len(around) == 1:
                set_owner(node, Owner(around, Evidence.INFERRED))


def complete_lines(nodes: Iterable[ir.Node], enclosing: Mapping[ir.Graph, ir.Node]) -> None:
    """Assign each node without a line that of a node of its call that it leads to, or else that it comes from."""
    forwards = list(nodes)
    for node in reversed(forwards):
        _take_line(node, consumers(node, enclosing))
    for node in forwards:
        _take_line(node, node.predecessors())


def _take_line(node: ir.Node, others: Iterable[ir.Node]) -> None:
    owner = owner_of(node)
    if owner is None or owner.line:
        return
    around = (other for each in others if (other := owner_of(each)) is not None)
    if line := next((other.line for other in around if other.line and other.call == owner.call), ""):
        set_owner(node, replace(owner, line=line))


def _calls_of(nodes: Iterable[ir.Node], placed: Mapping[ir.Node, tuple[ModuleCall, ...]]) -> tuple[ModuleCall, ...]:
    """The calls that produce the outputs of nodes; for new nodes, the calls that were assigned."""
    calls: dict[ModuleCall, None] = {}
    for node in nodes:
        owner = owner_of(node)
        calls.update(dict.fromkeys(placed.get(node, (owner.call,) if owner else ())))
    return tuple(calls)

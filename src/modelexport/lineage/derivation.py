"""Lineage: the owners of a changed graph, from a tagged one and the values that both have.

Tools that change a graph keep the names of many values. A node of the changed graph is *matched* with the source node
that makes the same value; where the names of values differ, matched nodes with the same operator tell, input by input,
which value stands for which. From that follow, in one walk from the outputs to the inputs and one back:

- a matched node with the same operator has the owner that it had;
- a node that stands for several equal source nodes has the owners of all of them;
- a matched node with another operator owns all that the source computes between the values that both graphs have and
  its output;
- a new node belongs to the matched nodes that it leads to, or else to those that it comes from.

The first keeps the evidence it had, the others are ``derived``. A node of which the source itself knew nothing gets the
call that all its neighbours agree on, which is ``inferred``. Cost is linear in nodes and edges.

:func:`derive_owners` is for a graph that was changed in place, in memory; :mod:`modelexport.descent` is the same
for a file that another tool wrote, of which less is known, so that it has a few rules more.

Names in the body of a local function are told from those of the graph and of other functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.owners import Evidence, Owner
from modelexport.graph.nodes import all_nodes, consumers, initializers, nested_graphs
from modelexport.graph.owners import OWNER, owner_of
from modelexport.graph.snapshot import _INDEX, Source, SourceNode, scoped_nodes

_IDENTITY = ("", "Identity", "")
"""Computes nothing, so that it leaves no owner behind where it was fused."""


def derive_owners(source: Source, changed: ir.Model) -> dict[str, ir.Value]:
    """Give every node of a changed graph its owner, in ``node.meta``; nodes that nothing is known of get none.

    Returns:
        The name of each value of the source to the value that it is in the changed graph, where there is one.
    """
    derivation = Derivation(source, changed)
    derivation.run()
    return derivation.values


@dataclass
class Derivation:
    source: Source
    changed: ir.Model
    matches: dict[ir.Node, list[int]] = field(default_factory=dict)
    """Changed node to the source nodes that it stands for; the one that makes its output first."""
    values: dict[str, ir.Value] = field(default_factory=dict)
    """Names of source values that the changed graph has, under that name or another, to what they are there."""
    behind: dict[str, tuple[ModuleCall, ...]] = field(default_factory=dict)
    enclosing: dict[ir.Graph, ir.Node] = field(default_factory=dict)
    """Nested graph to the node that holds it."""
    scopes: dict[ir.Node, str] = field(default_factory=dict)
    """Node in the body of a function to what its names begin with."""

    def run(self) -> None:
        nodes = list(self.nodes())
        self.values.update((value.name or "", value) for value in self.changed.graph.inputs)
        self.values.update((value.name or "", value) for value in initializers(self.changed))
        for node in nodes:
            index = self._match(node)
            if index is not None:
                self.matches[node] = [index]
                self._is(self.source.nodes[index], node)
        for node in reversed(nodes):
            for index in self.matches.get(node, ()):
                self._align(node, self.source.nodes[index])
        self.place(nodes)

    def nodes(self) -> Iterator[ir.Node]:
        """Every node, noting where it is."""
        for scope, node in scoped_nodes(self.changed):
            if scope:
                self.scopes[node] = scope
            self.enclosing.update((graph, node) for graph in nested_graphs(node))
            yield node

    def place(self, nodes: list[ir.Node]) -> None:
        """Give the nodes their owners, given which source nodes they are matched with."""
        for node in nodes:
            owner = self.owner(node) if node in self.matches else None
            node.meta.pop(OWNER, None)
            node.meta.pop(_INDEX, None)
            if owner is not None:
                node.meta[OWNER] = owner
        _place([node for node in nodes if node not in self.matches], self.enclosing)
        self._infer(nodes)

    def _match(self, node: ir.Node) -> int | None:
        index = node.meta.get(_INDEX)
        if index is not None:
            assert isinstance(index, int)
            return index
        for value in node.outputs:
            if (name := self.label(value)) in self.source.producer:
                return self.source.producer[name]
        return None

    def label(self, value: ir.Value) -> str:
        """The name of a value as the source would have it."""
        producer = value.producer()
        return f"{self.scopes.get(producer, '') if producer is not None else ''}{value.name}"

    def _align(self, node: ir.Node, before: SourceNode) -> None:
        """What stands where the same operator had another value is that value."""
        if node.op_identifier() != before.op or len(node.inputs) != len(before.inputs):
            return
        if not same_attributes(node.attributes, before.attributes):
            return
        for value, name in zip(node.inputs, before.inputs, strict=True):
            if value is None or name is None or self.label(value) == name or name in self.values:
                continue
            index = self.source.producer.get(name)
            producer = value.producer()
            if index is None or producer is None:
                continue
            duplicates = self.matches.setdefault(producer, [])
            if (
                not duplicates
                or self.source.nodes[index].op == self.source.nodes[duplicates[0]].op == producer.op_identifier()
            ):
                if index not in duplicates:
                    duplicates.append(index)
                self._is(self.source.nodes[index], producer)
            elif value.shape is not None and self.source.types.get(name) == (value.dtype, value.shape):
                # What made it did nothing, and is gone.
                self.values[name] = value

    def _is(self, before: SourceNode, node: ir.Node) -> None:
        """The outputs of a matched node are those of the source node, and whatever has a name of the source is that."""
        if before.op == node.op_identifier() and len(before.outputs) == len(node.outputs):
            self.values.update(zip(before.outputs, node.outputs, strict=True))
        self.values.update((name, v) for v in node.outputs if (name := self.label(v)) in self.source.producer)

    def owner(self, node: ir.Node) -> Owner | None:
        """The owner of a matched node."""
        matched = [self.source.nodes[index] for index in self.matches[node]]
        calls: dict[ModuleCall, None] = {}
        same = node.op_identifier() == matched[0].op
        for before in matched:
            if before.owner is not None:
                calls.update(dict.fromkeys(before.owner.calls))
            if not same:
                for name in before.inputs:
                    calls.update(dict.fromkeys(self.calls_behind(name)))
        first = matched[0].owner
        if same and len(matched) == 1 and first is not None:
            return first
        return Owner(tuple(calls), Evidence.DERIVED) if calls else None

    def calls_behind(self, name: str | None) -> tuple[ModuleCall, ...]:
        """The owners of what the source computes between the values that both graphs have and this one."""
        order: list[str] = []
        pending = [name] if name is not None else []
        while pending:
            current = pending.pop()
            if self.is_boundary(current) or current in self.behind:
                continue
            order.append(current)
            self.behind[current] = ()
            pending.extend(n for n in self.source.nodes[self.source.producer[current]].inputs if n is not None)
        for current in reversed(order):
            record = self.source.nodes[self.source.producer[current]]
            calls = dict.fromkeys(record.owner.calls if record.owner and record.op != _IDENTITY else ())
            for below in record.inputs:
                if below is not None:
                    calls.update(dict.fromkeys(self.behind.get(below, ())))
            self.behind[current] = tuple(calls)
        return self.behind.get(name, ()) if name is not None else ()

    def is_boundary(self, name: str) -> bool:
        """Whether a walk back through the source ends at a value."""
        return name in self.values or name in self.source.constant or name not in self.source.producer

    def _infer(self, nodes: list[ir.Node]) -> None:
        """A node of which the source itself knew nothing belongs to the call that everything around it belongs to."""
        for node in nodes:
            if OWNER not in node.meta:
                around = _calls_of([*_producers(node), *consumers(node, self.enclosing)], {})
                if len(around) == 1:
                    node.meta[OWNER] = Owner(around, Evidence.INFERRED)


def same_attributes(one: Mapping[str, ir.Attr], other: Mapping[str, ir.Attr]) -> bool:
    """Whether attributes are known to be equal; tensors and graphs are where they are the same object."""
    return one.keys() == other.keys() and all(
        attribute is other[name] or (attribute.type not in _BY_IDENTITY and attribute.value == other[name].value)
        for name, attribute in one.items()
    )


_BY_IDENTITY = (ir.AttributeType.TENSOR, ir.AttributeType.GRAPH, ir.AttributeType.TENSORS, ir.AttributeType.GRAPHS)


def place_unowned(model: ir.Model) -> None:
    """Give each node that has no owner the owners of the nodes that it leads to, or else of those it comes from."""
    nodes = list(all_nodes(model))
    _place([node for node in nodes if OWNER not in node.meta], _enclosing(nodes))


def _place(new: Sequence[ir.Node], enclosing: Mapping[ir.Graph, ir.Node]) -> None:
    """A new node belongs to the nodes that it leads to, or else to those that it comes from."""
    leads: dict[ir.Node, tuple[ModuleCall, ...]] = {}
    for node in reversed(new):
        leads[node] = _calls_of(consumers(node, enclosing), leads)
    for node in new:
        leads[node] = leads[node] or _calls_of(_producers(node), leads)
        if leads[node]:
            node.meta[OWNER] = Owner(leads[node], Evidence.DERIVED)


def _calls_of(nodes: Iterable[ir.Node], placed: Mapping[ir.Node, tuple[ModuleCall, ...]]) -> tuple[ModuleCall, ...]:
    """The calls that produce the outputs of nodes, or, for nodes that are new themselves, where those were placed."""
    calls: dict[ModuleCall, None] = {}
    for node in nodes:
        owner = owner_of(node)
        calls.update(dict.fromkeys(placed.get(node, (owner.call,) if owner else ())))
    return tuple(calls)


def _producers(node: ir.Node) -> Iterator[ir.Node]:
    for value in node.inputs:
        if value is not None and (producer := value.producer()) is not None:
            yield producer


def _enclosing(nodes: Iterable[ir.Node]) -> dict[ir.Graph, ir.Node]:
    """Nested graph to the node that holds it."""
    return {graph: node for node in nodes for graph in nested_graphs(node)}

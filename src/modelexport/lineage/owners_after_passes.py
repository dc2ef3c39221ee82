"""The owners of a graph that passes changed in memory, from a snapshot taken before the passes.

A node of the changed graph is *matched* with the source node that produces the same value. If the names of values
differ, the inputs of matched nodes with the same operator identify each other by position. Then:
- a matched node with the same operator keeps its owner and evidence;
- a node that replaces several equal source nodes has the owners of all of them (``derived``);
- a matched node with another operator has the owners of all source nodes between the values that both graphs have
  and its output (``derived``);
- a new node has the owners of the matched nodes that it leads to, or else of those that it comes from (``derived``);
- a node without an owner in the source gets the call of its neighbors, if they all have the same one (``inferred``).

The time is linear in nodes and edges. ``owners_by_matching.py`` does the same for files of other tools.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from modelexport.graph.node_owners import set_owner
from modelexport.graph.nodes import IDENTITY, all_nodes, enclosing_nodes, initializers
from modelexport.graph.snapshot import SourceGraph, SourceNode, take_mark
from modelexport.lineage.derived_and_inferred_owners import DerivedOwners, LostCalls, complete_owners, owner_of_replaced
from modelexport.lineage.matching.by_position import are_equal


def derive_owners(source: SourceGraph, changed: ir.Model) -> dict[str, ir.Value]:
    """Assign every node of a changed graph its owner, in ``node.meta``, if it can be found.

    Returns:
        The name of each value of the source to its value in the changed graph, if there is one.
    """
    nodes, state = list(all_nodes(changed)), _State(source)
    state.values.update((value.name or "", value) for value in (*changed.graph.inputs, *initializers(changed)))
    for node in nodes:
        state.match_outputs(node)
    for node in reversed(nodes):
        for index in state.matches.get(node, ()):
            state.match_inputs(node, source.nodes[index])
    lost, derived = LostCalls(source, state.values), DerivedOwners()
    for node in nodes:
        replaced = [source.nodes[index] for index in state.matches.get(node, ())]
        same = bool(replaced) and node.op_identifier() == replaced[0].op
        owning = [call for before in replaced if before.owner is not None for call in before.owner.calls]
        behind = [{} if same else lost.behind(before.inputs, owning) for before in replaced]
        set_owner(node, owner_of_replaced(replaced, behind, derived, same=same))
    new = [node for node in nodes if node not in state.matches]
    complete_owners(nodes, new, enclosing_nodes(nodes), derived)
    for name in source.producer:
        if name not in state.values and (value := state.values.get(state.unchanged(name))) is not None:
            state.values[name] = value
    return state.values


@dataclass
class _State:
    source: SourceGraph
    matches: dict[ir.Node, list[int]] = field(default_factory=dict)
    """Changed node to the source nodes that it replaces; the one that produces its output first."""
    values: dict[str, ir.Value] = field(default_factory=dict)
    """Names of source values to their values in the changed graph, which may have other names."""

    def match_outputs(self, node: ir.Node) -> None:
        """Match a node that is still the same object, or that produces a value with a name of the source."""
        index = take_mark(node)
        makers = [index] if index is not None else self._makers(node)
        if makers:
            self.matches[node] = makers
            self._record_outputs(self.source.nodes[makers[0]], node)

    def _makers(self, node: ir.Node) -> list[int]:
        """The source nodes that make the values of a node, in their order: several for one that was fused."""
        names = [name for value in node.outputs if (name := value.name or "") in self.source.producer]
        return list(dict.fromkeys(self.source.producer[name] for name in names))

    def match_inputs(self, node: ir.Node, before: SourceNode) -> None:
        """Match the inputs of a node with those of its source node, position by position."""
        if node.op_identifier() != before.op or len(node.inputs) != len(before.inputs):
            return
        if not are_equal(node.attributes, before.attributes):
            return
        for value, name in zip(node.inputs, before.inputs, strict=True):
            if value is None or name is None or name in self.values or value.name == name:
                continue
            index = self.source.producer.get(name)
            producer = value.producer()
            if index is not None and producer is not None:
                self._record_input(value, producer, index, name)

    def _record_input(self, value: ir.Value, producer: ir.Node, index: int, name: str) -> None:
        replaced = self.matches.setdefault(producer, [])
        expected = self.source.nodes[index].op
        is_equal = replaced and expected == self.source.nodes[replaced[0]].op == producer.op_identifier()
        if not replaced or (is_equal and not self._takes(index, replaced[0])):
            if index not in replaced:
                replaced.append(index)
            self._record_outputs(self.source.nodes[index], producer)
        elif value.shape is not None and self.source.types.get(name) == (value.dtype, value.shape):
            # The source node returned its input, and was removed.
            self.values[name] = value

    def _takes(self, index: int, maker: int) -> bool:
        """Whether a source node takes what another one makes, so that it is not a duplicate of it."""
        produced = self.source.nodes[maker].outputs
        return any(self.unchanged(name) in produced for name in self.source.nodes[index].inputs if name is not None)

    def unchanged(self, name: str) -> str:
        """The value that a source value is a copy of; itself if it is not one."""
        while (index := self.source.producer.get(name)) is not None:
            node = self.source.nodes[index]
            if node.op != IDENTITY or node.inputs[0] is None:
                break
            name = node.inputs[0]
        return name

    def _record_outputs(self, before: SourceNode, node: ir.Node) -> None:
        """Record the outputs of a matched node: by position if the operator is the same, and by name."""
        if before.op == node.op_identifier() and len(before.outputs) == len(node.outputs):
            self.values.update(zip(before.outputs, node.outputs, strict=True))
        self.values.update((name, v) for v in node.outputs if (name := v.name or "") in self.source.producer)

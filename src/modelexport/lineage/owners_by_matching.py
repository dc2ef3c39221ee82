"""The owners of a file that another tool made from a tagged one.

Less is known about such a file than about a graph that was changed in memory (``owners_after_passes.py``):
nodes are not marked, names have changed, attributes were rewritten. So a list of small matchers visits every node, each
with one clue that tools leave: :data:`WALKS` is that list, and :mod:`modelexport.lineage.matching` has them.
They share one state, :class:`~modelexport.lineage.matching.matching_state.Matching`. Then nodes get their owners:

- a node that is matched with one source node, with the same operator and no nodes lost before it, has that node's
  owner and evidence;
- any other matched node has the owners of all source nodes that it replaces, and of the lost nodes between these and
  the values that both graphs have (``derived``);
- a new node has the owners of the nodes that it leads to, or else of those that it comes from (``derived``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from modelexport.core.owners import Owner
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import may_be
from modelexport.graph.snapshot import SourceGraph, SourceNode
from modelexport.lineage.derived_and_inferred_owners import LostCalls, complete_owners, owner_of_replaced
from modelexport.lineage.matching.by_inputs_of_fused_nodes import match_by_fusion
from modelexport.lineage.matching.by_name import match_by_derived_name, match_by_name, name_given_values
from modelexport.lineage.matching.by_parameter import match_by_parameter
from modelexport.lineage.matching.by_position import match_by_position
from modelexport.lineage.matching.by_removed_neighbors import match_by_activation, match_by_folding, match_by_removal
from modelexport.lineage.matching.matching_state import REGION, Matching

Matcher = Callable[[Matching, ir.Node], None]
"""Matches a node, or the producers of its inputs, with source nodes, and records that in the state."""


@dataclass(frozen=True)
class Walk:
    """Matchers that are applied to every node in one walk over the graph."""

    matchers: tuple[Matcher, ...]
    backwards: bool = False
    """Walk from the outputs to the inputs: for matchers that go from a node to its producers."""


WALKS = (
    Walk((match_by_name,)),
    Walk((match_by_derived_name,)),
    Walk((match_by_parameter,), backwards=True),
    Walk((match_by_folding, match_by_removal)),
    Walk((match_by_activation,)),
    Walk((match_by_position, match_by_fusion), backwards=True),
)
"""The most reliable matchers come first: each uses the results of those before it."""

Reason = Literal["merged", "fused", "between"]
"""Why a node has several owners: equal nodes were merged, nodes were fused, or it is new between nodes of several."""


@dataclass(frozen=True)
class Descent:
    """How a changed graph was made from a tagged one. Its nodes have their owners in ``meta``."""

    values: Mapping[str, ir.Value]
    """Names of source values to their values in the changed graph, for those that it has."""
    names: Mapping[ir.Value, str]
    """Values of the changed graph to the source value that they are equal to or a variant of."""
    merged: Mapping[ir.Value, Sequence[str]]
    """Initializers of the changed graph to the other source initializers that they replace."""
    lost: Mapping[ir.Value, Sequence[str]]
    """Initializers to the source initializers that were used in their place and no longer exist."""
    common: int
    """The number of values of the changed graph, with initializers, that are or are variants of a source value."""
    total: int
    """The number of values of the changed graph, with initializers."""
    several: Mapping[ir.Node, Reason]
    """Nodes with several owners that they did not have before, to why they have them."""


def trace_owners(source: SourceGraph, changed: ir.Model, walks: Sequence[Walk] = WALKS) -> Descent:
    """Assign every node of a changed graph its owner, if it can be found.

    Args:
        source: A snapshot of the tagged graph.
        changed: The graph that a tool made from it, without local functions.
        walks: The matchers, in their order.
    """
    state = Matching(source, changed)
    name_given_values(state)
    for walk in walks:
        nodes: Iterable[ir.Node] = reversed(state.nodes) if walk.backwards else state.nodes
        for node in nodes:
            for matcher in walk.matchers:
                matcher(state, node)
    several = _place_owners(state)
    common, total = _count_common(state)
    return Descent(_present(state), state.names, state.merged, _lost_initializers(state), common, total, several)


def _place_owners(state: Matching) -> dict[ir.Node, Reason]:
    """Assign the owners of nodes; returns the nodes that have several owners and did not before."""
    lost = LostCalls(state.source, state.values, state.variants)
    several: dict[ir.Node, Reason] = {}
    unowned: list[ir.Node] = []
    for node in state.nodes:
        owner, reason = _owner(state, node, lost) if node in state.matches else (None, None)
        set_owner(node, owner)
        if owner is None:
            unowned.append(node)
        elif reason is not None and [state.source.nodes[index].owner for index in state.matches[node]] != [owner]:
            several[node] = reason
    new = [node for node in unowned if node not in state.matches]
    complete_owners(state.nodes, new, state.enclosing, state.derived)
    for node in new:
        owner = owner_of(node)
        if owner is not None and len(owner.calls) > 1:
            several[node] = "between"
    return several


def _owner(state: Matching, node: ir.Node, lost: LostCalls) -> tuple[Owner | None, Reason | None]:
    """The owner of a matched node, and why it has several."""
    replaced = [state.source.nodes[index] for index in state.matches[node]]
    same = node not in state.approximate and node.op_identifier() == replaced[0].op
    behind = [{} if _takes_result(state, node, before) else lost.behind(before.inputs) for before in replaced]
    owner = owner_of_replaced(replaced, behind, state.derived, same=same)
    several = owner is not None and len(owner.calls) > 1 and (any(behind) or not same or len(replaced) > 1)
    reason: Reason = "merged" if same and not any(behind) else "fused"
    return owner, reason if several else None


def _takes_result(state: Matching, node: ir.Node, before: SourceNode) -> bool:
    """Whether a node uses the output of a source node, or a variant of it: no earlier node was fused into it then."""
    names, outputs = state.names, before.outputs
    for value in node.inputs:
        if value is not None and names.get(value) in outputs and not value.is_initializer():
            return True
    return False


def _lost_initializers(state: Matching) -> dict[ir.Value, list[str]]:
    """Initializers to the source initializers that were used in their place and no longer exist under any name."""
    there = {state.names[value] for value in state.initializers if value in state.names}
    there.update(name for names in state.merged.values() for name in names)
    gone = state.source.initializers.keys() - there
    lost: dict[ir.Value, list[str]] = {}
    for value in state.initializers if gone else ():
        names: dict[str, None] = {}
        for node in value.consumers():
            for index in state.region(state.matches.get(node, ()), REGION):
                names.update((name, None) for name in state.source.nodes[index].inputs if name and name in gone)
        lost[value] = list(names)
    return lost


def _present(state: Matching) -> dict[str, ir.Value]:
    """Source values to values of the changed graph: with the same name, the same shape, or the same producer."""

    def is_kept(value: ir.Value) -> bool:
        producer = value.producer()
        return producer is not None and state.is_exact(producer)

    return {
        name: value
        for name, value in state.values.items()
        if may_be(value.shape, shape := state.source.shape_of(name))
        and (value.name == name or value.shape == shape or is_kept(value))
    }


def _count_common(state: Matching) -> tuple[int, int]:
    """The number of values of the changed graph that come from a source value, and of all values."""
    values = [value for node in state.changed.graph for value in node.outputs if value.name]
    values += [*state.changed.graph.inputs, *state.initializers]
    names, common = state.names, 0
    for value in values:
        name = names.get(value)
        if name is not None and (value.name != name or _has_its_shape(state, value, name)):
            common += 1
    return common, len(values)


def _has_its_shape(state: Matching, value: ir.Value, name: str) -> bool:
    """Whether a value with the name of a source value may be that value."""
    tensor = state.source.initializers.get(name) if value.is_initializer() else None
    if tensor is not None and value.const_value is not None:
        return bool(tensor.size == value.const_value.size)
    return may_be(state.source.shape_of(name), value.shape)

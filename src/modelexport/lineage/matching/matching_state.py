"""The state that all matchers read and write: what is known so far about how a changed graph was made."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property

import onnx_ir as ir

from modelexport.graph.nodes import all_nodes, enclosing_nodes, initializers
from modelexport.graph.operator_kinds import KEEPS_ORDER
from modelexport.graph.snapshot import SourceGraph, SourceNode
from modelexport.lineage.derived_and_inferred_owners import DerivedOwners
from modelexport.lineage.matching.original_names import OriginalNames

# Each search is bounded, so that the total time is linear in nodes. "Measured" is the smallest bound that changes no
# owner on 330 files (22 models, 15 tools). Larger bounds change none either; these leave a margin for other tools.
NODES_AROUND = 16
"""Nodes to search around a node for connected nodes (measured: 8)."""
CHAIN = 4
"""Consecutive casts, reshapes and the like to follow (measured: 2)."""
REGION = 200
"""Source nodes to search if one node replaces many (measured: 16)."""

SKIPPED_WHEN_MATCHING = KEEPS_ORDER | {"Cast", "Transpose"}
"""ONNX operators that compute nothing. Tools remove or move them."""


@dataclass
class Matching:
    """A changed graph, its source graph, and the matches of their nodes and values."""

    source: SourceGraph
    changed: ir.Model
    matches: dict[ir.Node, list[int]] = field(default_factory=dict)
    """Changed node to the source nodes that it replaces; the one that produces its output first."""
    approximate: set[ir.Node] = field(default_factory=set)
    """Matched nodes that produce a variant of the source node's value: quantized, cast, or in another layout."""
    names: dict[ir.Value, str] = field(default_factory=dict)
    """Changed value to the name of the source value that it is equal to or a variant of."""
    values: dict[str, ir.Value] = field(default_factory=dict)
    """Name of a source value to the equal changed value, without variants."""
    variants: set[str] = field(default_factory=set)
    """Source values that have a variant in the changed graph."""
    merged: dict[ir.Value, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Changed initializer to the other source initializers that it replaces."""
    parameters_of: dict[ir.Node, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Changed node to the source nodes whose parameters it uses."""
    derived: DerivedOwners = field(default_factory=DerivedOwners)
    """The owners of nodes that were changed."""
    counted: dict[str, Counter[int]] = field(default_factory=dict)
    """Names of source values to how often each source node uses them, for those that were asked for."""

    @cached_property
    def nodes(self) -> list[ir.Node]:
        """Every node of the changed graph, nested graphs included."""
        return list(all_nodes(self.changed))

    @cached_property
    def initializers(self) -> list[ir.Value]:
        """The initializers of the changed graph and of nested graphs."""
        return list(initializers(self.changed))

    @cached_property
    def enclosing(self) -> Mapping[ir.Graph, ir.Node]:
        """Each nested graph of the changed graph to its enclosing node."""
        return enclosing_nodes(self.nodes)

    @cached_property
    def new_initializers(self) -> frozenset[ir.Value]:
        """The initializers that have neither a name of the source nor one derived from it; some are matched later."""
        return frozenset([value for value in self.initializers if value not in self.names])

    @cached_property
    def operators(self) -> frozenset[str]:
        """The types of the source's operators."""
        return frozenset([node.op[1] for node in self.source.nodes])

    @cached_property
    def originals(self) -> OriginalNames:
        """Finds the name of the source that a longer name is derived from."""
        return OriginalNames(self.source)

    # --- what is known

    def is_present(self, name: str) -> bool:
        """Whether the changed graph has a source value, or a variant of it."""
        return name in self.values or name in self.variants

    def is_exact(self, node: ir.Node) -> bool:
        """Whether a node is matched, and has the operator of the source node that produces its output."""
        matched = self.matches.get(node)
        return matched is not None and node.op_identifier() == self.source.nodes[matched[0]].op

    def unknown_inputs(self, node: ir.Node) -> list[tuple[int, ir.Value]]:
        """The inputs of a node without a known maker, each after its position."""
        names, approximate = self.names, self.approximate
        return [
            (position, value)
            for position, value in enumerate(node.inputs)
            if value is not None
            and (producer := value.producer()) is not None
            and (producer in approximate or value not in names)
        ]

    def is_constant(self, value: ir.Value) -> bool:
        """Whether a value depends only on initializers and constants, as far as is known."""
        return value.is_initializer() or self.names.get(value) in self.source.constant

    def shape_of(self, value: ir.Value) -> ir.Shape | None:
        """The shape of a changed value, or else of its source value."""
        return value.shape if value.shape is not None else self.source.shape_of(self.names.get(value, ""))

    def shares_input(self, node: ir.Node, before: SourceNode) -> bool:
        """Whether a node and a source node have an input in common."""
        return any(self.names.get(value) in before.inputs for value in node.inputs if value is not None)

    def passed_on(self, value: ir.Value | None) -> str | None:
        """The source name of a value, or of the value that it was made from by new nodes with one input each."""
        names = self.names
        for _ in range(CHAIN):
            if value is None or value in names:
                break
            producer = value.producer()
            if producer is None or producer in self.matches:
                break
            inputs = computed_inputs(producer)
            value = inputs[0] if len(inputs) == 1 else None
        return names.get(value) if value is not None else None

    def users_among(self, indices: Set[int], name: str) -> list[int]:
        """The nodes of these that use a source value, once for each use. Other users of it take no time."""
        uses = self.counted.get(name)
        if uses is None:
            uses = self.counted[name] = Counter(self.source.users.get(name, ()))
        return [index for index in uses.keys() & indices for _ in range(uses[index])]

    def region(self, indices: Iterable[int], limit: int) -> list[int]:
        """The source nodes before these, back to values that are present, last first, with these nodes.

        Args:
            indices: The nodes to begin with.
            limit: Stop when more nodes than this are found.
        """
        indices_behind = self._back(indices, limit, self.source.constant, self.values, self.variants)
        return sorted(indices_behind, reverse=True) if len(indices_behind) > 1 else indices_behind

    def behind(self, index: int, limit: int) -> Iterator[SourceNode]:
        """A source node and the nodes that it is computed from, nearest first, up to a limit."""
        return (self.source.nodes[other] for other in self._back([index], limit))

    def _back(self, indices: Iterable[int], limit: int, *ends: Collection[str]) -> list[int]:
        """Source nodes and those that they are computed from, nearest first; values in ``ends`` are not followed."""
        nodes, producer = self.source.nodes, self.source.producer
        reached = dict.fromkeys(indices)
        pending = list(reached)
        for index in pending:  # which grows
            if len(reached) > limit:
                break
            for name in nodes[index].inputs:
                made_at = producer.get(name)  # type: ignore[arg-type]  # nothing produces None
                if made_at is None or made_at in reached:
                    continue
                for end in ends:
                    if name in end:
                        break
                else:
                    reached[made_at] = None
                    pending.append(made_at)
        return pending

    # --- what a matcher found

    def record_value(self, name: str, value: ir.Value) -> None:
        """Record that a changed value is a source value."""
        self.values[name] = value
        self.names[value] = name

    def record_variant(self, name: str, value: ir.Value) -> None:
        """Record that a changed value is a source value in another type, layout or shape."""
        self.names[value] = name
        self.variants.add(name)

    def record_match(self, node: ir.Node, index: int) -> None:
        """Record that a node is a source node and produces the same values, under the same names or others."""
        self.matches[node] = [index]
        before = self.source.nodes[index]
        pairs = list(zip(before.outputs, node.outputs, strict=False)) if is_same_operation(node, before) else []
        pairs += [(name, value) for value in node.outputs if (name := value.name or "") in self.source.producer]
        for name, value in pairs:
            if value.name == name or (value not in self.names and name not in self.values):
                self.record_value(name, value)

    def record_output(self, node: ir.Node, value: ir.Value, index: int, name: str) -> None:
        """Record that a node produces the value of a source node, and so replaces it, possibly among others."""
        replaced = self.matches.setdefault(node, [])
        if index not in replaced:
            replaced.insert(0, index)
        if is_same_operation(node, self.source.nodes[index]):
            self.approximate.discard(node)
        self.record_value(name, value)


def is_same_operation(node: ir.Node, before: SourceNode) -> bool:
    """Whether a node has the operator and the number of outputs of a source node."""
    return node.op_identifier() == before.op and len(before.outputs) == len(node.outputs)


def computed_inputs(node: ir.Node) -> list[ir.Value]:
    """The inputs of a node, without initializers."""
    return [value for value in node.inputs if value is not None and not value.is_initializer()]

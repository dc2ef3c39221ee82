"""Two files node by node: which nodes are the same, and what was added, removed, changed or fused.

Nodes are the same if they have the same operator and give a value of the same name, or else if they are in the same
call and the same place of its operators. What is left is put into groups: nodes that lead to a value of the same name,
or to the same input of nodes that are the same, are replaced by one another.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

import onnx_ir as ir

from modelexport.core.calls import ROOT, ModuleCall
from modelexport.core.text import plural
from modelexport.graph.attribute_texts import format_attributes
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import stored_tensors
from modelexport.graph.parameter_plans import parameter_plan
from modelexport.tables.page_graph import type_text
from modelexport.tagged.file import TaggedFile

Mark = Literal["", "added", "removed", "changed", "fused"]
_LISTED = 6
"""The operators that a reason lists."""


@dataclass(frozen=True)
class NodePair:
    """A node of each file, or of one of them, and what became of it."""

    first: ir.Node | None
    second: ir.Node | None
    mark: Mark = ""
    why: str = ""


def pair_nodes(first: TaggedFile, second: TaggedFile) -> list[NodePair]:
    """Every node of two files except constants, those that both have together."""
    sides = _Side(first), _Side(second)
    partners = _partners(*sides)
    taken, pairs = {*partners.values()}, []
    for left, right in partners.items():
        differences = _differences(left, right, sides, partners, taken)
        pairs.append(NodePair(left, right, "changed" if differences else "", "; ".join(differences)))
    for old, new in _Groups(sides, partners).found():
        why = f"{_operators(old)} \u2192 {_operators(new)}" if old and new else ""
        mark: Mark = "removed" if not new else "added" if not old else "fused" if len(old) > len(new) else "changed"
        if len(old) == len(new) == 1:
            pairs.append(NodePair(old[0], new[0], mark, why))
        else:
            pairs += [NodePair(node, None, mark, why) for node in old]
            pairs += [NodePair(None, node, mark, why) for node in new]
    return pairs


def count_marks(pairs: Iterable[NodePair]) -> dict[str, int]:
    """How many nodes have each mark; of what was replaced, those of the first file."""
    counted = Counter(pair.mark for pair in pairs if pair.mark and (pair.first is not None or pair.mark == "added"))
    return {mark: counted[mark] for mark in ("added", "removed", "changed", "fused") if counted[mark]}


class _Side:
    """The nodes of a file, their calls and the names of their values."""

    def __init__(self, tagged: TaggedFile) -> None:
        self.tagged = tagged
        self.weights = dict(stored_tensors(tagged.model))
        self.nodes = [node for node in tagged.nodes if node.op_type != "Constant" or node.inputs]
        self.by_value = {value.name: node for node in self.nodes for value in node.outputs if value.name}
        self.names = {*self.by_value, *(value.name for value in tagged.model.graph.inputs)}
        self._digests: dict[ir.Value, str] = {}

    def call(self, node: ir.Node) -> ModuleCall:
        owner = owner_of(node)
        return owner.call if owner is not None else ROOT

    def digest(self, value: ir.Value) -> str:
        """Type, shape and elements of a weight."""
        if value not in self._digests:
            tensor = self.weights[value]
            self._digests[value] = hashlib.sha256(tensor.tobytes()).hexdigest()
        return self._digests[value]

    def keys(self, node: ir.Node) -> tuple[str, ...]:
        """The parameters that a node takes."""
        plans = (parameter_plan(value) for value in node.inputs if value is not None and value in self.weights)
        return tuple(plan.keys[0] for plan in plans if plan is not None and plan.keys)


def _partners(first: _Side, second: _Side) -> dict[ir.Node, ir.Node]:
    """Nodes of the first file to the same nodes of the second."""
    namesakes = {
        node: other
        for node in first.nodes
        if (other := next((second.by_value.get(value.name) for value in node.outputs if value.name), None)) is not None
        and _operator(other) == _operator(node)
    }
    partners = {node: other for node, other in namesakes.items() if first.call(node) == second.call(other)}
    _align(first, second, partners, lambda side, node: (_operator(node), side.keys(node)))
    _align(first, second, partners, lambda side, node: _operator(node))
    taken = {*partners.values()}
    moved = {node: other for node, other in namesakes.items() if node not in partners and other not in taken}
    return partners | moved


def _align(
    first: _Side, second: _Side, partners: dict[ir.Node, ir.Node], key: Callable[[_Side, ir.Node], Hashable]
) -> None:
    """Pair the remaining nodes of each call by the order of their keys."""
    known = ({*partners}, {*partners.values()})
    remaining = defaultdict[ModuleCall, tuple[list[ir.Node], list[ir.Node]]](lambda: ([], []))
    for index, side in enumerate((first, second)):
        for node in side.nodes:
            if node not in known[index]:
                remaining[side.call(node)][index].append(node)
    for old, new in remaining.values():
        matcher = SequenceMatcher(None, [key(first, n) for n in old], [key(second, n) for n in new], autojunk=False)
        for block in matcher.get_matching_blocks():
            for offset in range(block.size):
                partners[old[block.a + offset]] = new[block.b + offset]


class _Groups:
    """The nodes without a partner, those that replace one another together."""

    def __init__(self, sides: tuple[_Side, _Side], partners: Mapping[ir.Node, ir.Node]) -> None:
        self._sides, self._parents = sides, dict[ir.Node, ir.Node]()
        paired = ({*partners}, {*partners.values()})
        self._left = [
            [node for node in side.nodes if node not in known] for side, known in zip(sides, paired, strict=True)
        ]
        alone = {*self._left[0], *self._left[1]}
        self._same_names(alone)
        for left, right in partners.items():
            for old, new in zip(left.inputs, right.inputs, strict=False):
                self._join_producers(old, new, alone)
        for old, new in zip(sides[0].tagged.model.graph.outputs, sides[1].tagged.model.graph.outputs, strict=False):
            self._join_producers(old, new, alone)
        self._same_calls()

    def _same_names(self, alone: set[ir.Node]) -> None:
        for side, other in (self._sides, self._sides[::-1]):
            for node in side.nodes:
                if node not in alone:
                    continue
                for value in node.inputs:  # a value that the other file has as well ends a group
                    producer = value.producer() if value is not None else None
                    if producer in alone and value is not None and value.name not in other.names:
                        self._join(producer, node)
                for name in (value.name for value in node.outputs):
                    if name in other.by_value and other.by_value[name] in alone:
                        self._join(node, other.by_value[name])

    def _join_producers(self, old: ir.Value | None, new: ir.Value | None, alone: set[ir.Node]) -> None:
        producers = [value.producer() if value is not None else None for value in (old, new)]
        if producers[0] in alone and producers[1] in alone:
            self._join(*producers)

    def _same_calls(self) -> None:
        """Join what is left over in the same call on both sides."""
        sides_of: dict[ir.Node, set[int]] = defaultdict(set)
        for index, nodes in enumerate(self._left):
            for node in nodes:
                sides_of[self._top(node)].add(index)
        first: dict[tuple[ModuleCall, int], ir.Node] = {}
        for index, nodes in enumerate(self._left):
            for node in nodes:
                if len(sides_of[self._top(node)]) == 1:
                    call = self._sides[index].call(node)
                    first.setdefault((call, index), node)
                    if (call, 1 - index) in first:
                        self._join(first[call, 1 - index], node)

    def _top(self, node: ir.Node) -> ir.Node:
        while (parent := self._parents.get(node, node)) is not node:
            node = parent
        return node

    def _join(self, first: ir.Node | None, second: ir.Node | None) -> None:
        assert first is not None
        assert second is not None
        self._parents[self._top(second)] = self._top(first)

    def found(self) -> Iterable[tuple[list[ir.Node], list[ir.Node]]]:
        groups: dict[ir.Node, tuple[list[ir.Node], list[ir.Node]]] = {}
        for index, nodes in enumerate(self._left):
            for node in nodes:
                groups.setdefault(self._top(node), ([], []))[index].append(node)
        return groups.values()


def _differences(
    left: ir.Node,
    right: ir.Node,
    sides: tuple[_Side, _Side],
    partners: Mapping[ir.Node, ir.Node],
    taken: Container[ir.Node],
) -> list[str]:
    """What differs in a node that both files have."""
    found = []
    texts = [
        format_attributes(node, side.tagged.model.opset_imports.get(node.domain, 1))
        for node, side in zip((left, right), sides, strict=True)
    ]
    if texts[0] != texts[1]:
        found.append("other attributes")
    calls = [side.call(node) for node, side in zip((left, right), sides, strict=True)]
    if calls[0] != calls[1]:
        found.append(f"of {calls[0]}, now of {calls[1]}")
    for old, new in zip(left.inputs, right.inputs, strict=False):
        found += _different_input(old, new, sides, partners, taken)
    if len(left.inputs) != len(right.inputs):
        found.append("other number of inputs")
    for old, new in zip(left.outputs, right.outputs, strict=False):
        types = [value.dtype for value in (old, new)]
        if None not in types and types[0] != types[1]:
            found.append(f"gives {type_text(new)} for {type_text(old)}")
    return list(dict.fromkeys(found))


def _different_input(
    old: ir.Value | None,
    new: ir.Value | None,
    sides: tuple[_Side, _Side],
    partners: Mapping[ir.Node, ir.Node],
    taken: Container[ir.Node],
) -> list[str]:
    if old is None or new is None:
        return [] if old is new else ["other inputs"]
    weights = [value in side.weights for value, side in zip((old, new), sides, strict=True)]
    if any(weights):
        if not all(weights):
            return ["a weight or a computed value"]
        texts = [type_text(value) for value in (old, new)]
        if texts[0] != texts[1]:
            return [f"weight {old.name}: {texts[0]} \u2192 {texts[1]}"]
        return [f"weight {old.name} has other numbers"] if sides[0].digest(old) != sides[1].digest(new) else []
    producers = old.producer(), new.producer()
    if producers[0] is None or producers[1] is None:
        return ["takes another value"] if producers[0] is producers[1] and old.name != new.name else []
    partner = partners.get(producers[0])
    return (
        ["takes another value"] if partner is not None and partner is not producers[1] and producers[1] in taken else []
    )


def _operators(nodes: Sequence[ir.Node]) -> str:
    counted = Counter(node.op_type for node in nodes)
    listed = [f"{count} {name}" if count > 1 else name for name, count in counted.items()]
    more = [f"and {plural(len(listed) - _LISTED, 'more operator')}"] if len(listed) > _LISTED else []
    return ", ".join([*listed[:_LISTED], *more])


def _operator(node: ir.Node) -> tuple[str, str]:
    return node.domain, node.op_type

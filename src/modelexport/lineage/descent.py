"""Descent: the owners of a file that another tool made of a tagged one.

The rules are those of :mod:`modelexport.lineage`. Of a file from outside less is known than of a graph that was changed
in memory, so that a node is matched by what is left:

- by the name of a value that it makes, as there;
- by a name *made after* one: ``linear_3_quantized``, ``node_MatMul_46/MatMulAddFusion``. Such a node makes a variant of
  the value. The name counts only where the node takes what the value is computed from: names alone would do harm
  where two tools number their values in the same way;
- by the parameter that it takes, where one source node took that, or one of those that are lost around it;
- by an attribute that names an operator (``activation: Relu``), which the node then holds too;
- by where it stands: what a node with the same operator takes in the place of a value is that value, and a node with
  the operator and the inputs of one source node makes what that makes;
- by what a fusion must hold: the nearest source node whose operator is in the name of the fused one (``Conv`` in
  ``QLinearConv``) takes what the fused node takes.

A node with the operator that the source had is ``exact`` where nothing between its inputs and its output was lost. A
variant of a value never is.

Over 400 lines because the rules work on one another's findings, and are read in the order in which they run.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import onnx
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.owners import Evidence, Owner
from modelexport.graph.nodes import consumers, initializers, may_be
from modelexport.graph.owners import owner_of
from modelexport.graph.snapshot import Source, SourceNode
from modelexport.lineage.derivation import Derivation, same_attributes

_MOVES = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators of ONNX that compute nothing: tools drop them, or move them."""
_SEPARATOR = re.compile(r"[^A-Za-z0-9]+")
_NEAR = 24
"""Source nodes between a value and what a node may take to make a variant of it."""
_CHAIN = 4
"""Nodes that do no more than pass a value on (casts, reshapes), one behind the other."""
_REGION = 1_000
"""Source nodes that one node may stand for, where they are looked at one by one."""


@dataclass(frozen=True)
class Descent:
    """How a changed graph comes from a tagged one. Its nodes carry their owners."""

    values: Mapping[str, ir.Value]
    """Names of source values to what they are in the changed graph, where they are there."""
    names: Mapping[ir.Value, str]
    """Values of the changed graph to the source value that they are, or are a variant of."""
    merged: Mapping[ir.Value, Sequence[str]]
    """Initializers of the changed graph to others of the source that they stand for too."""
    lost: Mapping[ir.Value, Sequence[str]]
    """Initializers to those of the source that were used where they are used, and are not there any more."""
    common: int
    """Values of the changed graph, initializers included, that are or are variants of a source value."""
    total: int
    several: Mapping[ir.Node, str]
    """Nodes with several owners to why they have."""


def trace_owners(source: Source, changed: ir.Model) -> Descent:
    """Give every node of a changed graph its owner, in ``node.meta``; nodes that nothing is known of get none."""
    descent = _Descent(source, changed)
    descent.run()
    return Descent(
        descent.present(),
        descent.names,
        descent.merged,
        descent.lost(),
        *descent.shared(),
        dict(descent.several()),
    )


class _Names:
    """The names of a source: those of its values, and those of its nodes for the first value that they make."""

    def __init__(self, source: Source) -> None:
        self._values = {node.name: node.outputs[0] for node in source.nodes if node.name and node.outputs}
        known = (*source.producer, *source.initializers, *source.inputs)
        self._values.update((name, name) for name in known)

    def original(self, name: str | None) -> str | None:
        """The value whose name, or whose node's name, a longer name begins or ends with: the longest such."""
        if not name:
            return None
        if name in self._values:
            return self._values[name]
        gaps = list(_SEPARATOR.finditer(name))
        for gap in reversed(gaps):
            # A number behind it makes another name of the same kind: `add_77` is not made after `add`.
            if name[: gap.start()] in self._values and name[gap.end() : gap.end() + 1].isalpha():
                return self._values[name[: gap.start()]]
        for gap in gaps:
            if name[gap.end() :] in self._values and not name[gap.end() :].isdigit():
                return self._values[name[gap.end() :]]
        return None


@dataclass
class _Descent(Derivation):
    names: dict[ir.Value, str] = field(default_factory=dict)
    variants: set[str] = field(default_factory=set)
    """Source values of which the changed graph has a variant."""
    resembling: set[ir.Node] = field(default_factory=set)
    """Nodes that make a variant of a value and not the value itself."""
    merged: dict[ir.Value, list[str]] = field(default_factory=lambda: defaultdict(list))
    anchors: dict[ir.Node, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Nodes to the source nodes whose parameters they take."""
    placed: dict[ir.Node, str] = field(default_factory=dict)

    def run(self) -> None:
        nodes = list(self.nodes())
        self._name_constants()
        for node in nodes:
            index = self._by_value_name(node)
            if index is not None:
                self.matches[node] = [index]
                self._is_made_by(node, index)
        for node in nodes:
            if node not in self.matches:
                self._resemble(node)
        for node in reversed(nodes):
            self._by_parameters(node)
        for node in nodes:
            if node in self.resembling:
                self._by_activation(node)
        for node in reversed(nodes):
            for index in list(self.matches.get(node, ())):
                self._look_behind(node, index)
        for node in nodes:
            if node not in self.matches:
                self._by_inputs(node)
        self.place(nodes)

    # --- matching

    def _name_constants(self) -> None:
        for value in (*self.changed.graph.inputs, *initializers(self.changed)):
            name = value.name or ""
            if self._known(name):
                self.values[name] = value
                self.names[value] = name
            elif (original := self._original.original(name)) is not None:
                self._is_variant(value, original)

    def _known(self, name: str) -> bool:
        return name in self.source.producer or name in self.source.initializers or name in self._inputs

    def _by_value_name(self, node: ir.Node) -> int | None:
        made = [self.source.producer[name] for v in node.outputs if (name := v.name or "") in self.source.producer]
        return max(made, default=None)

    def _is_made_by(self, node: ir.Node, index: int) -> None:
        before = self.source.nodes[index]
        pairs = list(zip(before.outputs, node.outputs, strict=False)) if self._is_same(node, before) else []
        pairs += [(value.name or "", value) for value in node.outputs if value.name in self.source.producer]
        for name, value in pairs:
            if value.name == name or (value not in self.names and name not in self.values):
                self.values[name] = value
                self.names[value] = name

    def _is_same(self, node: ir.Node, before: SourceNode) -> bool:
        return node.op_identifier() == before.op and len(before.outputs) == len(node.outputs)

    def _is_variant(self, value: ir.Value, original: str) -> None:
        self.names[value] = original
        self.variants.add(original)

    def _resemble(self, node: ir.Node) -> None:
        """Match a node whose output, or which itself, is named after a value of the source."""
        for value, name in [(value, value.name) for value in node.outputs] + [(node.outputs[0], node.name)]:
            original = self._original.original(name)
            if original is None or value in self.names:
                continue
            index = self.source.producer.get(original)
            if index is None:  # of a graph input or an initializer: belongs to what it leads to
                if any(self.names.get(used) == original for used in node.inputs if used is not None):
                    self._is_variant(value, original)
            elif self._takes_what(node, original):
                self._is_variant(value, original)
                self.matches.setdefault(node, [index])
                self.resembling.add(node)

    def _takes_what(self, node: ir.Node, original: str) -> bool:
        """Whether a node takes something that a source value is computed from, nearby, or the value itself."""
        near = {original}
        region = self._region([self.source.producer[original]], _NEAR, through=True)
        near.update(name for index in region for name in self.source.nodes[index].inputs if name is not None)
        for value in node.inputs:
            name = self._passed_on(value)
            if name in near and (name not in self.source.constant or len(self._users.get(name or "", ())) == 1):
                return True
        return False

    def _passed_on(self, value: ir.Value | None) -> str | None:
        """The name of a value, or of what new nodes with one input each made it of."""
        for _ in range(_CHAIN):
            producer = value.producer() if value is not None else None
            if value is None or value in self.names or producer is None or producer in self.matches:
                break
            given = [used for used in producer.inputs if used is not None and not used.is_initializer()]
            value = given[0] if len(given) == 1 else None
        return self.names.get(value) if value is not None else None

    def _by_parameters(self, node: ir.Node) -> None:
        """A node that takes the parameter of a source node which is lost around it holds that node."""
        if node in self.matches and node not in self.resembling and self._is_same_operator(node):
            return
        if all(value is None or self._is_constant(value) for value in node.inputs):
            return
        found = self.matches.get(node, [])
        around: set[int] | None = None
        for value in node.inputs:
            name = self.names.get(value) if value is not None and value.is_initializer() else None
            if value is None or name is None or name not in self.source.initializers:
                continue
            users = self._users.get(name, [])
            if len(users) != 1 or len(value.uses()) != 1:
                around = self._around(node) if around is None else around
                users = [user for user in users if user in around]
            if len(users) == 1 and users[0] not in found:
                self.anchors[node].append(users[0])
        if not self.anchors.get(node):
            return
        first = max(self.anchors[node])
        before = self.source.nodes[first]
        if not found:
            if self._is_same(node, before) and self._shares_input(node, before) and set(self.anchors[node]) == {first}:
                self.matches[node] = [first]
                self._is_made_by(node, first)
                return
            self.resembling.add(node)
        if node.outputs[0] not in self.names:
            self._is_variant(node.outputs[0], before.outputs[0])
        self.matches[node] = sorted({*found, *self.anchors[node]}, reverse=True)

    def _around(self, node: ir.Node) -> set[int]:
        """The source nodes that are lost where a node stands: behind itself, or the next nodes that are known."""
        known = list(self.matches.get(node, ()))
        pending, seen = [node], {node}
        while pending and not known and len(seen) <= _NEAR:
            for user in consumers(pending.pop(), self.enclosing):
                known.extend(self.matches.get(user, ()))
                if user not in self.matches and user not in seen:
                    seen.add(user)
                    pending.append(user)
        return set(self._region(known, _REGION))

    def _is_same_operator(self, node: ir.Node) -> bool:
        return node.op_identifier() == self.source.nodes[self.matches[node][0]].op

    def _is_constant(self, value: ir.Value) -> bool:
        return value.is_initializer() or self.names.get(value) in self.source.constant

    def _by_activation(self, node: ir.Node) -> None:
        """A variant of a value may go on to an operator that an attribute of the node names: ``activation: Relu``."""
        named = {a.as_string() for a in node.attributes.values() if a.type == ir.AttributeType.STRING}
        index = self.matches[node][0]
        if not named & self._operators or any(
            self.source.nodes[i].op[1] in named for i in self._region(self.matches[node], _NEAR)
        ):
            return
        for _ in range(_CHAIN):
            users = {user for output in self.source.nodes[index].outputs for user in self._users.get(output, ())}
            outputs = {output for user in users for output in self.source.nodes[user].outputs}
            if len(users) != 1 or any(output in self.variants for output in outputs):
                return
            index = users.pop()
            if self.source.nodes[index].op[1] in named:
                self.matches[node].insert(0, index)
                self._is_variant(node.outputs[0], self.source.nodes[index].outputs[0])
                return

    @cached_property
    def _operators(self) -> frozenset[str]:
        return frozenset(node.op[1] for node in self.source.nodes)

    def _look_behind(self, node: ir.Node, index: int) -> None:
        """What a node takes in the place of a source value is that value."""
        before = self.source.nodes[index]
        if node not in self.resembling and node.op_identifier() == before.op:
            self._align(node, before)
        else:
            self._look_into(node, index)

    def _align(self, node: ir.Node, before: SourceNode) -> None:
        if len(node.inputs) != len(before.inputs) or not _compatible(node.attributes, before.attributes):
            return
        pairs = [(v, n) for v, n in zip(node.inputs, before.inputs, strict=True) if v is not None and n is not None]
        differing = [(value, name) for value, name in pairs if self.names.get(value) != name]
        for value, name in differing:
            if value.is_initializer():
                self._initializer_is(value, name)
                continue
            index = self.source.producer.get(name)
            producer = value.producer()
            if index is None or name in self.values:
                continue
            if producer is None:
                if len(differing) == 1 and self._shape_of(value) == self.source.types.get(name, (None, None))[1]:
                    self.values[name] = value
            elif value not in self.names or producer in self.resembling:
                self._makes(producer, value, index, name)
            elif name not in self.variants:
                self._has_two_names(value, producer, index, name, alone=len(differing) == 1)

    def _initializer_is(self, value: ir.Value, name: str) -> None:
        """An initializer in the place of another: a tool merged equal ones, or renamed it."""
        tensor = self.source.initializers.get(name)
        if tensor is None or value.const_value is None or tensor.size != value.const_value.size:
            return
        if value not in self.names:
            self.names[value] = name
            self.values.setdefault(name, value)
        elif name not in self.values and name not in self.merged[value]:
            self.merged[value].append(name)

    def _makes(self, node: ir.Node, value: ir.Value, index: int, name: str) -> None:
        """A node makes a source value, under another name than in the source."""
        stands = self.matches.setdefault(node, [])
        if index not in stands:
            stands.insert(0, index)
        if self._is_same(node, self.source.nodes[index]):
            self.resembling.discard(node)
        self.values[name] = value
        self.names[value] = name

    def _has_two_names(self, value: ir.Value, producer: ir.Node, index: int, name: str, *, alone: bool) -> None:
        """A value of one name stands where the source has another: equal nodes became one, or a node did nothing."""
        duplicates = self.matches.get(producer, [])
        other, one = self.source.nodes[index], self.source.nodes[duplicates[0]] if duplicates else None
        if one is not None and self._takes_others(producer, one):
            # The name is the one that the value had before something was folded into the node.
            self.values.pop(self.names[value], None)
            self._makes(producer, value, index, name)
            return
        if one is not None and one.op == other.op == producer.op_identifier():
            if same_attributes(one.attributes, other.attributes) or _compatible(producer.attributes, other.attributes):
                if index not in duplicates:
                    duplicates.append(index)
                self.values[name] = value
        elif alone and self.source.types.get(name, (None, None))[1] == self._shape_of(value):
            self.values[name] = value

    def _takes_others(self, node: ir.Node, before: SourceNode) -> bool:
        """Whether a node takes parameters of which the source knows nothing."""
        return any(
            value.is_initializer()
            and value not in self.names
            and (i >= len(before.inputs) or before.inputs[i] is None or before.inputs[i] in self.source.initializers)
            for i, value in enumerate(node.inputs)
            if value is not None
        )

    def _shape_of(self, value: ir.Value) -> ir.Shape | None:
        return (
            value.shape
            if value.shape is not None
            else self.source.types.get(self.names.get(value, ""), (None, None))[1]
        )

    def _look_into(self, node: ir.Node, index: int) -> None:
        """Find what a fused node, or one that passes a value on, takes, where names do not tell."""
        unknown = [(i, v) for i, v in enumerate(node.inputs) if v is not None and self._is_open(v)]
        if not unknown:
            return
        given = [v for v in node.inputs if v is not None and not v.is_initializer()]
        core = self._core(node, index, len(given))
        if core is None:
            if len(unknown) == 1 and unknown[0][1] not in self.names:
                self._look_through(unknown[0][1], self.source.nodes[index], index)
            return
        taken = self._computed(core)
        for position, value in unknown:
            places = self.source.nodes[core].inputs
            name = taken[0] if len(taken) == 1 else places[position] if position < len(places) else None
            made_by = value.producer()
            if made_by is None or name not in self.source.producer or core in self.matches.get(made_by, ()):
                continue
            made_at, name = self._behind_movement(made_by, name)
            if name not in self.values:
                self._makes(made_by, value, made_at, name)

    def _core(self, node: ir.Node, index: int, inputs: int) -> int | None:
        """The source node that takes what a fused node takes: of its operator, or else of its parameters."""
        region = [core for core in self._region([index], _REGION) if len(self._computed(core)) == inputs]
        held: dict[str, int] = {}
        for core in region:
            if _holds(node, self.source.nodes[core]):
                held.setdefault(self.source.nodes[core].op[1], core)
        anchored = (core for core in region if inputs == 1 and core in self.anchors.get(node, ()))
        return min(held.values()) if held else next(anchored, None)

    def _computed(self, index: int) -> list[str]:
        """What a source node takes that is no constant."""
        return [name for name in self.source.nodes[index].inputs if name and name not in self.source.constant]

    def _behind_movement(self, node: ir.Node, name: str) -> tuple[int, str]:
        """The source value that a node makes, given one that may be that in another shape, layout or type."""
        made_at = self.source.producer[name]
        for _ in range(_CHAIN):
            before = self.source.nodes[made_at]
            moved = before.inputs[0] if before.inputs else None
            if before.op[1] not in _MOVES or before.op == node.op_identifier() or moved not in self.source.producer:
                break
            if moved in self.values or moved is None:
                break
            made_at, name = self.source.producer[moved], moved
        return made_at, name

    def _look_through(self, value: ir.Value, before: SourceNode, index: int) -> None:
        """Behind a chain of nodes that pass a value on may be the node that made it."""
        for _ in range(_CHAIN):
            producer = value.producer()
            if producer is None or producer in self.matches:
                return
            if producer.op_identifier() == before.op and self._shares_input(producer, before):
                self.matches[producer] = [index]
                if len(producer.outputs) == len(before.outputs):
                    self.names.update(zip(producer.outputs, before.outputs, strict=True))
                return
            given = [v for v in producer.inputs if v is not None and not v.is_initializer()]
            if len(given) != 1:
                return
            value = given[0]

    def _shares_input(self, node: ir.Node, before: SourceNode) -> bool:
        return any(self.names.get(value) in before.inputs for value in node.inputs if value is not None)

    def _is_open(self, value: ir.Value) -> bool:
        """Whether it is computed, and not known, or only as a variant."""
        producer = value.producer()
        return producer is not None and (value not in self.names or producer in self.resembling)

    def _by_inputs(self, node: ir.Node) -> None:
        """Match a node with the one source node that has its operator and its inputs."""
        known = tuple(self.names.get(v) for v in node.inputs if v is not None and not v.is_initializer())
        if not known or None in known:
            return
        candidates = [
            index
            for index in self._by_signature.get((node.op_identifier(), known), ())
            if not any(name in self.values for name in self.source.nodes[index].outputs)
            and _compatible(node.attributes, self.source.nodes[index].attributes)
        ]
        constants = {self.names.get(v) for v in node.inputs if v is not None and v.is_initializer()} - {None}
        if len(candidates) > 1 and constants:
            candidates = [i for i in candidates if constants <= set(self.source.nodes[i].inputs)]
        if len(candidates) == 1:
            self.matches[node] = candidates
            self._is_made_by(node, candidates[0])

    @cached_property
    def _by_signature(self) -> Mapping[tuple[ir.OperatorIdentifier, tuple[str | None, ...]], list[int]]:
        found: dict[tuple[ir.OperatorIdentifier, tuple[str | None, ...]], list[int]] = defaultdict(list)
        for index, node in enumerate(self.source.nodes):
            taken = tuple(name for name in node.inputs if name is not None and name not in self.source.initializers)
            found[node.op, taken].append(index)
        return found

    @cached_property
    def _users(self) -> Mapping[str, list[int]]:
        found: dict[str, list[int]] = defaultdict(list)
        for index, node in enumerate(self.source.nodes):
            for name in node.inputs:
                if name is not None:
                    found[name].append(index)
        return found

    @cached_property
    def _original(self) -> _Names:
        return _Names(self.source)

    @cached_property
    def _inputs(self) -> frozenset[str]:
        return frozenset(self.source.inputs)

    def _region(self, indices: Sequence[int], limit: int, *, through: bool = False) -> list[int]:
        """What the source computes up to these nodes from values that both graphs have, last first.

        Args:
            limit: How many nodes at most.
            through: Do not stop at values that both have.
        """
        pending, seen = list(indices), set(indices)
        for index in pending:
            if len(seen) > limit:
                break
            for name in self.source.nodes[index].inputs:
                made_at = self.source.producer.get(name or "")
                if made_at is None or made_at in seen or name is None:
                    continue
                if through or not self.is_boundary(name):
                    seen.add(made_at)
                    pending.append(made_at)
        return sorted(seen, reverse=True)

    # --- owners

    def is_boundary(self, name: str) -> bool:
        return name in self.variants or super().is_boundary(name)

    def owner(self, node: ir.Node) -> Owner | None:
        """The owner of a matched node: exact where it is the source's node and nothing before it was lost."""
        matched = [self.source.nodes[index] for index in self.matches[node]]
        calls: dict[ModuleCall, None] = {}
        for before in matched:
            calls.update(dict.fromkeys(before.owner.calls if before.owner is not None else ()))
        same = node not in self.resembling and node.op_identifier() == matched[0].op
        fused: dict[ModuleCall, None] = {}
        for before in matched:
            if self._passes_on(node, before):
                continue
            for name in before.inputs:
                fused.update(dict.fromkeys(self.calls_behind(name)))
        first = matched[0].owner
        if same and len(matched) == 1 and not fused:
            return first
        calls.update(fused)
        if len(calls) > 1:
            merged = same and not fused
            self.placed[node] = "equal operations of these calls became one" if merged else "fused out of these calls"
        return Owner(tuple(calls), Evidence.DERIVED) if calls else None

    def _passes_on(self, node: ir.Node, before: SourceNode) -> bool:
        """Whether a node takes the value of which it makes a variant, or a variant of the value that it makes."""
        given = (value for value in node.inputs if value is not None and not value.is_initializer())
        return any(self.names.get(value) in before.outputs for value in given)

    # --- what is told of it

    def lost(self) -> dict[ir.Value, list[str]]:
        """Initializers to those of the source that were used where they are used, and are not here under any name."""
        there = {self.names[value] for value in initializers(self.changed) if value in self.names}
        there.update(name for names in self.merged.values() for name in names)
        found: dict[ir.Value, list[str]] = {}
        for value in initializers(self.changed):
            names: dict[str, None] = {}
            for node, _ in value.uses():
                region = self._region(self.matches.get(node, ()), _REGION)
                used = (name for index in region for name in self.source.nodes[index].inputs)
                names.update((n, None) for n in used if n in self.source.initializers and n not in there and n)
            found[value] = list(names)
        return found

    def _is_kept(self, value: ir.Value) -> bool:
        """Whether a value is made as the source makes it."""
        producer = value.producer()
        return producer is not None and producer in self.matches and self._is_same_operator(producer)

    def present(self) -> dict[str, ir.Value]:
        """Source values to what they are here: under the same name, or with the same shape."""
        return {
            name: value
            for name, value in self.values.items()
            if may_be(value.shape, shape := self.source.types.get(name, (None, None))[1])
            and (value.name == name or value.shape == shape or self._is_kept(value))
        }

    def shared(self) -> tuple[int, int]:
        """Values of the changed graph that come from one of the source, and all."""
        values = [value for node in self.changed.graph for value in node.outputs if value.name]
        values += [*self.changed.graph.inputs, *initializers(self.changed)]
        return sum(self._agrees(value) for value in values), len(values)

    def _agrees(self, value: ir.Value) -> bool:
        name = self.names.get(value)
        if name is None:
            return False
        tensor = self.source.initializers.get(name)
        if value.is_initializer() and tensor is not None and value.name == name and value.const_value is not None:
            return bool(tensor.size == value.const_value.size)
        return value.name != name or may_be(self.source.types.get(name, (None, None))[1], value.shape)

    def several(self) -> Iterator[tuple[ir.Node, str]]:
        """The nodes with several owners, and why they have."""
        for node in self.nodes():
            owner = owner_of(node)
            if owner is not None and len(owner.calls) > 1:
                before = self.matches.get(node)
                kept = before is not None and len(before) == 1 and self.source.nodes[before[0]].owner == owner
                if not kept:
                    yield node, self.placed.get(node, "new, between operations of these calls")


def _holds(node: ir.Node, inside: SourceNode) -> bool:
    """Whether a node's operator is named after a source node's: ``QLinearConv`` after ``Conv``, not after ``Con``."""
    return inside.op[1] in _operators_in(node.op_type)


@cache
def _operators_in(op_type: str) -> frozenset[str]:
    """The standard operators in the name of another: of ``FusedMatMul`` it is ``MatMul``, and not ``Mul``."""
    standard = {schema.name for schema in onnx.defs.get_all_schemas()}
    inside = {name for name in standard if name in op_type and not re.match("QLinear|.*Integer", name)}
    return frozenset(name for name in inside if not any(name in other for other in inside - {name}))


def _compatible(one: Mapping[str, ir.Attr], other: Mapping[str, ir.Attr]) -> bool:
    """Whether the attributes of two nodes do not contradict each other: what one leaves out is its default."""
    return all(
        attribute.type != other[name].type or attribute.value == other[name].value
        for name, attribute in one.items()
        if name in other and attribute.type in _PLAIN and not attribute.is_ref()
    )


_PLAIN = (
    ir.AttributeType.INT,
    ir.AttributeType.INTS,
    ir.AttributeType.FLOAT,
    ir.AttributeType.FLOATS,
    ir.AttributeType.STRING,
    ir.AttributeType.STRINGS,
)

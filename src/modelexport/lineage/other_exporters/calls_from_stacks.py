"""Makes calls, trees and owners from the module stacks that other exporters recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from modelexport.core.calls import ROOT, CallTree, ModuleCall, TracedCall
from modelexport.core.module_tree import Module, ModuleTree
from modelexport.core.owners import Evidence, Owner
from modelexport.graph.node_owners import OWNER, owner_of
from modelexport.graph.nodes import all_nodes, producers
from modelexport.lineage.other_exporters.recorded_stacks import CallSource, Found, Scope, Stack

UNKNOWN_CLASS = "Module"
"""The class name in a tag if the class is unknown and the path has only numbers."""


@dataclass
class Placing:
    """The modules and calls of a model, and the number of nodes placed by each source."""

    tree: ModuleTree
    calls: CallTree
    sources: Counter[CallSource]


def place_by_stacks(model: ir.Model, found: Mapping[ir.Node, Found]) -> Placing:
    """Assign nodes with a stack their owner, in ``node.meta``, and find all calls."""
    numbers = _Numbers(found.values())
    calls: dict[ModuleCall, TracedCall] = {ROOT: TracedCall(ROOT, None, 0, None, None)}
    scopes: dict[str, Scope] = {"": Scope("")}
    sources: Counter[CallSource] = Counter()
    for node in all_nodes(model):
        known = found.get(node)
        stack = numbers.calls(known.stack) if known is not None else None
        if known is None or stack is None:
            continue
        above = ROOT
        for scope, call in zip(known.stack, stack, strict=True):
            if not scopes.get(scope.path, Scope("")).class_name:
                scopes[scope.path] = scope
            if call not in calls:
                calls[call] = TracedCall(call, above, calls[above].depth + 1, None, None)
            above = call
        node.meta[OWNER] = Owner((above,), known.evidence)
        sources[known.source] += 1
    return Placing(_module_tree(scopes), _callers_first(calls), sources)


def _callers_first(calls: Mapping[ModuleCall, TracedCall]) -> CallTree:
    """The calls in the order of a run, each followed by the calls inside it: nodes may be in another order."""
    unordered = CallTree(tuple(calls.values()))
    ordered: list[TracedCall] = []
    pending = [ROOT]
    while pending:
        call = pending.pop()
        ordered.append(unordered[call])
        pending.extend(reversed(unordered.children[call]))
    return CallTree(tuple(ordered))


@dataclass
class _Numbers:
    """Numbers the calls whose number was not recorded, in the order in which they appear."""

    found: Iterable[Found]
    recorded: dict[str, set[int]] = field(default_factory=dict)
    given: dict[tuple[str, Hashable], ModuleCall] = field(default_factory=dict)
    next: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for scope in {scope for known in self.found for scope in known.stack}:
            if scope.index is not None:
                self.recorded.setdefault(scope.path, set()).add(scope.index)

    def calls(self, stack: Stack) -> list[ModuleCall] | None:
        """The call of each scope; ``None`` if one of them could be any of several whose numbers are known."""
        calls = []
        for scope in stack:
            call = self._call(scope)
            if call is None:
                return None
            calls.append(call)
        return calls

    def _call(self, scope: Scope) -> ModuleCall | None:
        if not scope.path:
            return ROOT
        if scope.index is not None:
            return ModuleCall(scope.path, scope.index)
        if (recorded := self.recorded.get(scope.path)) is not None:
            return ModuleCall(scope.path, next(iter(recorded))) if len(recorded) == 1 else None
        key = (scope.path, scope.identity)
        if key not in self.given:
            self.given[key] = ModuleCall(scope.path, self.next[scope.path])
            self.next[scope.path] += 1
        return self.given[key]


def _module_tree(scopes: Mapping[str, Scope]) -> ModuleTree:
    """The modules with these paths and the containers that they are in, parents before children."""
    paths = {path.rsplit(".", cut)[0] for path in scopes for cut in range(path.count(".") + 1)}
    modules: dict[str, Module] = {}
    for path in sorted(paths | {""}, key=lambda path: (path.count("."), path)):
        scope = scopes.get(path, Scope(path))
        above, _, name = path.rpartition(".")
        modules[path] = Module(
            path=path,
            class_name=scope.class_name or _stand_in(path),
            class_module=scope.class_module,
            parent=above if path else None,
            name=name,
            depth=path.count(".") + 1 if path else 0,
        )
    return ModuleTree(modules)


def _stand_in(path: str) -> str:
    """A name for an unknown class: the last name in the path, ``layer`` of ``encoder.layer.0``."""
    names = [part for part in path.split(".") if part and not part.isdecimal()]
    name = names[-1] if names else UNKNOWN_CLASS
    return name.replace("%", "%25").replace("/", "%2F").replace("@", "%40")


def infer(model: ir.Model) -> int:
    """Assign owners to regions of unowned nodes that are surrounded by one call; returns the number of nodes.

    A region is a set of connected nodes without owners. It gets the call that all nodes around it belong to, unless one
    of its nodes produces an output of the graph. Constants (nodes without inputs) are ignored when regions are formed:
    a constant without an owner gets the call that all its users belong to.
    """
    unknown = {node for node in all_nodes(model) if owner_of(node) is None and node.inputs}
    placed = 0
    for region in _regions(unknown):
        if any(value.is_graph_output() for node in region for value in node.outputs):
            continue
        around: set[ModuleCall | None] = set()
        for node in region:
            for other in (*producers(node), *_users(node)):
                if other not in unknown and other.inputs:
                    around.update(_owners(other))
        placed += _give(region, around)
    for node in all_nodes(model):
        if owner_of(node) is None and not node.inputs:
            placed += _give([node], {call for user in _users(node) for call in _owners(user)})
    return placed


def _regions(nodes: set[ir.Node]) -> Iterator[set[ir.Node]]:
    """The connected sets among some nodes."""
    near: dict[ir.Node, set[ir.Node]] = {node: set() for node in nodes}
    for node in nodes:
        for other in producers(node):
            if other in near:
                near[node].add(other)
                near[other].add(node)
    while near:
        region, reached = set(), {next(iter(near))}
        while reached:
            region |= reached
            reached = {other for node in reached for other in near.pop(node)} - region
        yield region


def _give(nodes: Collection[ir.Node], calls: set[ModuleCall | None]) -> int:
    if len(calls) != 1 or (call := calls.pop()) is None:
        return 0
    for node in nodes:
        node.meta[OWNER] = Owner((call,), Evidence.INFERRED)
    return len(nodes)


def _owners(node: ir.Node) -> tuple[ModuleCall | None, ...]:
    owner = owner_of(node)
    return (None,) if owner is None else owner.calls


def _users(node: ir.Node) -> Iterator[ir.Node]:
    for value in node.outputs:
        for user, _ in value.uses():
            yield user

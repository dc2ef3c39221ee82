"""Calls, their tree and the owners of nodes, made from the module stacks that other exporters recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from modelexport.core.calls import ROOT, CallTree, ModuleCall, TracedCall
from modelexport.core.module_tree import Module, ModuleTree
from modelexport.core.owners import Owner
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import all_nodes
from modelexport.tagged.found_calls.operator_classes import guess_class
from modelexport.tagged.found_calls.recorded_stacks import CallSource, Found, Stack, StackEntry

UNKNOWN_CLASS = "Module"
"""The class name in a tag if the class is unknown and the path has only numbers."""


@dataclass
class Placing:
    """The modules and calls of a model, and the number of nodes placed by each source."""

    scopes: Mapping[str, StackEntry]
    """The modules by path, without the containers that are not called."""
    calls: CallTree
    sources: Counter[CallSource]

    def module_tree(self, nodes: Iterable[ir.Node]) -> ModuleTree:
        """The modules with their containers, parents before children. An unknown class is guessed from operators.

        Args:
            nodes: All nodes of the model, with owners.
        """
        own_nodes: dict[str, list[ir.Node]] = {}
        for node in nodes:
            owner = owner_of(node)
            if owner is not None and owner.call.index == 0 and not self.calls.children[owner.call]:
                own_nodes.setdefault(owner.call.path, []).append(node)
        paths = {path.rsplit(".", cut)[0] for path in self.scopes for cut in range(path.count(".") + 1)}
        modules: dict[str, Module] = {}
        for path in sorted(paths | {""}, key=lambda path: (path.count("."), path)):
            scope = self.scopes.get(path, StackEntry(path))
            above, _, name = path.rpartition(".")
            modules[path] = Module(
                path=path,
                class_name=scope.class_name
                or (guess_class(own_nodes.get(path, ())) if path else "")
                or _stand_in(path),
                class_module=scope.class_module,
                parent=above if path else None,
                name=name,
                depth=path.count(".") + 1 if path else 0,
            )
        return ModuleTree(modules)


def place_by_stacks(model: ir.Model, stacks: Mapping[ir.Node, Found]) -> Placing:
    """Assign nodes with a stack their owner, in ``node.meta``, and find all calls."""
    numbers = _Numbers(stacks.values())
    calls: dict[ModuleCall, TracedCall] = {ROOT: TracedCall(ROOT, None, 0, None, None)}
    scopes: dict[str, StackEntry] = {"": StackEntry("")}
    sources: Counter[CallSource] = Counter()
    for node in all_nodes(model):
        known = stacks.get(node)
        stack = numbers.calls(known.stack) if known is not None else None
        if known is None or stack is None:
            continue
        above = ROOT
        for scope, call in zip(known.stack, stack, strict=True):
            if not scopes.get(scope.path, StackEntry("")).class_name:
                scopes[scope.path] = scope
            if call not in calls:
                calls[call] = TracedCall(call, above, calls[above].depth + 1, None, None)
            above = call
        set_owner(node, Owner((above,), known.evidence))
        sources[known.source] += 1
    return Placing(scopes, _callers_first(calls), sources)


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

    def _call(self, scope: StackEntry) -> ModuleCall | None:
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


def _stand_in(path: str) -> str:
    """A name for an unknown class: the last name in the path, ``layer`` of ``encoder.layer.0``."""
    names = [part for part in path.split(".") if part and not part.isdecimal()]
    name = names[-1] if names else UNKNOWN_CLASS
    return name.replace("%", "%25").replace("/", "%2F").replace("@", "%40")

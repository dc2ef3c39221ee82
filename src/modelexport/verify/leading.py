"""The calls that a node whose value PyTorch does not show may belong to: those of the values that it leads to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import cache

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.graph.owners import owner_of
from modelexport.runtime.evidence import Evidence
from modelexport.runtime.fingerprints import Fingerprint, Index, fingerprint_of
from modelexport.verify.matching import FileRun, tensors_by_call

Calls = frozenset[ModuleCall]

MOVES = ("Gather", "GatherND", "GatherElements", "Slice", "Split", "Expand", "Tile", "Concat")
"""Operators that compute nothing: each element of their results is an element of their inputs. The rows that a module
selects from a tensor contain numbers computed elsewhere."""


def reached_calls(
    model: ir.Model,
    known: Mapping[ir.Node, Calls],
    made: Mapping[ir.Node, Calls],
    run: FileRun,
    evidence: Evidence,
    again: Collection[ir.Node] = (),
) -> dict[ir.Node, Calls]:
    """The nodes that lead to values with a known call, and the calls of the first such values.

    A node that computes something belongs to a call that computed such a value, if there is one, and not to one that
    only rearranged it: a recurrence transposes its result, and the module that gets it transposes it back. A value of
    a few different numbers does not tell its call; then a node before it may also belong to any call that returns it,
    or to that of its own node, if PyTorch computed it there. Nor do integers and conditions: a node before those that a
    call gets may also belong to the call that made them. What only gives sizes leads to no call: sizes have no numbers
    of it.

    Args:
        made: Nodes that only pass on a value that PyTorch computed, to the calls that did.
        again: Nodes that compute a value again from itself: calls that got it are as right as the one that computed it.
    """
    makers = _Makers(run, evidence, made)
    returning = cache(makers.returning)

    def leads_to(user: ir.Node, after: Mapping[ir.Node, Calls]) -> Calls:
        return after.get(user, frozenset()) | returning(user)

    any_call: dict[ir.Node, Calls] = {}
    computing: dict[ir.Node, Calls] = {}
    found: dict[ir.Node, Calls] = {}
    by_numbers: set[ir.Node] = set()
    for node in reversed(model.graph):
        uses = [use for value in node.outputs for use in value.uses()]
        users = [user for user, _ in uses]
        any_call[node] = _union(known.get(user) or leads_to(user, found) for user in users)
        computing[node] = _union(
            (known[user] if user in again else makers.of(user, known[user], node))
            if known.get(user)
            else leads_to(user, computing)
            for user in users
        )
        found[node] = any_call[node] if makers.rearranges(node) else computing[node]
        if any(
            known.get(user) or user in by_numbers or returning(user)
            for user, place in uses
            if not _is_size(user, place)
        ):
            by_numbers.add(node)
    return {node: calls for node, calls in found.items() if node in by_numbers or node in known}


def _is_size(user: ir.Node, place: int) -> bool:
    """Whether a node uses only the size of an input, or the input as one."""
    return user.domain == "" and place in _OF_SIZES.get(user.op_type, ())


_OF_SIZES = {
    "Shape": (0,),
    "Size": (0,),
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "Reshape": (1,),
    "Tile": (1,),
    "Split": (1,),
    "Pad": (1,),
}
"""Operators to those of their inputs whose numbers are in none of their results."""


class _Makers:
    """Tells computing from rearranging by norms, which do not depend on an order."""

    def __init__(self, run: FileRun, evidence: Evidence, made: Mapping[ir.Node, Calls]) -> None:
        self._prints, self._evidence, self._made = run.prints, evidence, made
        self._contents = run.contents
        self._gets = tensors_by_call(evidence, "inputs")
        self._returning: dict[str, set[ModuleCall]] = defaultdict(set)
        for call, tensors in tensors_by_call(evidence, "outputs").items():
            for tensor in tensors:
                self._returning[tensor.content].add(call)
        self._giving = _giving(evidence)
        self._getting: dict[str, set[ModuleCall]] = defaultdict(set)
        for call, tensors in self._gets.items():
            for tensor in tensors:
                self._getting[tensor.content].add(call)
        self._quiet: dict[ModuleCall, Index[Fingerprint]] = defaultdict(Index)
        for call, prints in {(one.call, one.fingerprint): None for one in evidence.quiet}:
            self._quiet[call].add(prints, prints)
        self._known: dict[ModuleCall, list[Fingerprint]] = {}

    def of(self, node: ir.Node, calls: Calls, before: ir.Node) -> Calls:
        """Those of the calls that have a node's value that did not get it in another order; all, if all did.

        Of these, those that computed it count before those that only move its elements. A node before that makes an
        operand without effect is of the call that passed the other one on, if that is the node's own.
        """
        if len(calls) < 2:
            return calls
        owner = owner_of(node)
        content = self._contents.get(node.outputs[0].name or "", "")
        passing = (calls - self._made.get(node, frozenset())) | self._getting.get(content, set())
        if owner is not None and owner.call in passing and self._changes_nothing(before, node):
            return frozenset({owner.call})
        own = [self._prints[name] for value in node.outputs if (name := value.name or "") in self._prints]
        got = {call for call in calls for one in self._taken(call) if any(_is_rearranged(one, its) for its in own)}
        left = calls - got or calls
        return left & self._made.get(node, frozenset()) or left

    def _changes_nothing(self, before: ir.Node, node: ir.Node) -> bool:
        """Whether a node passes on what another one than that before it makes."""
        own = self._prints.get(node.outputs[0].name or "")
        passed = [value for value in node.inputs if value is not None and own is not None and self._is_same(value, own)]
        return bool(passed) and all(value.producer() is not before for value in passed)

    def _is_same(self, value: ir.Value, own: Fingerprint) -> bool:
        its = self._prints.get(value.name or "")
        return its is not None and its.same(own)

    def returning(self, node: ir.Node) -> Calls:
        """The calls that return what a node gives, if that does not tell them apart; its own, if that computed it.

        Of integers and conditions also those that made them for a call that gets them.
        """
        names = [value.name or "" for value in node.outputs]
        plain = [name for name in names if name in self._prints and not self._prints[name].telling]
        owner = owner_of(node)
        own = owner.calls if owner is not None and plain else ()
        computed = (
            frozenset(call for call in own if call in self._quiet and any(self._quiet[call].near(self._prints[name])))
            for name in plain
        )
        returned = (frozenset(self._returning.get(self._contents.get(name, ""), ())) for name in plain)
        whole = [self._contents.get(name, "") for name in plain if self._prints[name].kind != "f"]
        given = (frozenset(self._giving.get(content, ())) for content in whole)
        return _union([*computed, *returned, *given])

    def rearranges(self, node: ir.Node) -> bool:
        """Whether what a node gives is what it takes, in any order, or a part of it."""
        if node.domain == "" and node.op_type in MOVES:
            return True
        taken = [self._prints.get(value.name or "") for value in node.inputs if value is not None]
        given = [self._prints.get(value.name or "") for value in node.outputs]
        return any(a is not None and b is not None and _is_rearranged(a, b) for a in taken for b in given)

    def _taken(self, call: ModuleCall) -> list[Fingerprint]:
        if call not in self._known:
            contents = dict.fromkeys(tensor.content for tensor in self._gets.get(call, []))
            self._known[call] = [fingerprint_of(self._evidence.array(content)) for content in contents]
        return self._known[call]


def _giving(evidence: Evidence) -> dict[str, set[ModuleCall]]:
    """Each content to the calls that made it for a call in them: none had given it to them, or returned it there."""
    found: dict[str, set[ModuleCall]] = defaultdict(set)
    at_hand: set[tuple[ModuleCall | None, str]] = set()
    for tensor in evidence.tensors:  # in the order of the run
        around = evidence.parents.get(tensor.call)
        if tensor.side == "inputs":
            if around is not None and (around, tensor.content) not in at_hand:
                found[tensor.content].add(around)
            at_hand.add((tensor.call, tensor.content))
        at_hand.add((around, tensor.content))
    return found


def _is_rearranged(one: Fingerprint, other: Fingerprint) -> bool:
    return (one.kind, one.size) == (other.kind, other.size) and abs(one.norm - other.norm) <= _SAME * one.norm


_SAME = 1e-5


def _union(several: Iterable[Calls]) -> Calls:
    return frozenset(call for calls in several for call in calls)

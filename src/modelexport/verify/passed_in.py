"""Nodes given to a caller that are of a call in it, though their numbers do not tell: a count of a mask, for example.

What a caller computes and a call in it uses is a result of an operation of the caller, or passes through it. If
PyTorch's operations there gave no such numbers, and only nodes of one call inside use them, they are not the caller's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod

import onnx_ir as ir

from modelexport.core.calls import CallTree, ModuleCall
from modelexport.core.owners import Evidence as OwnerEvidence
from modelexport.graph.nodes import nested_graphs
from modelexport.graph.owners import owner_of
from modelexport.runtime.evidence import Evidence
from modelexport.runtime.fingerprints import Fingerprint, Index, fingerprint_of
from modelexport.verify.matching import FileRun, paths_called_as_often

Calls = frozenset[ModuleCall]


def quiet_nodes_of_callers(
    model: ir.Model, calls: CallTree, run: FileRun, evidence: Evidence
) -> Iterator[tuple[ir.Node, list[ModuleCall], Calls]]:
    """Nodes that are given to a call around their own, with that call, and with those that use their values."""
    if not evidence.quiet:
        return
    at_hand = _AtHand(evidence)
    same = paths_called_as_often(calls, evidence)
    for node in model.graph:
        owner, own = owner_of(node), run.prints.get(node.outputs[0].name or "")
        if owner is None or own is None or own.telling or own.kind != "f" or own.size < _LEAST:
            continue
        call, users = owner.call, _users(node)
        if owner.evidence is not OwnerEvidence.EXACT or len(owner.calls) > 1 or nested_graphs(node):
            continue
        if call not in evidence.parents or call.path not in same:
            continue
        if _in_one_call_of(call, users, calls) and not at_hand.has(call, own):
            yield node, [call], users


_LEAST = 4
_NEAR = 1e-2
"""How far, in norms, numbers of other types and other steps may be: there are few such in a call."""


def _users(node: ir.Node) -> Calls:
    """The calls of the nodes that use what a node computes; none if that is not known, or an output of the file."""
    found = set[ModuleCall]()
    for value in node.outputs:
        for user, _ in value.uses():
            owner = owner_of(user)
            if owner is None or owner.evidence is not OwnerEvidence.EXACT:
                return frozenset()
            found.update(owner.calls)
        if value.is_graph_output():
            return frozenset()
    return frozenset(found)


def _in_one_call_of(call: ModuleCall, users: Calls, calls: CallTree) -> bool:
    """Whether calls are all in one that another call made, or that one itself."""
    if not users or any(user == call or user not in calls or call not in calls.stack(user) for user in users):
        return False
    return len({calls.stack(user)[len(calls.stack(call))] for user in users}) == 1


class _AtHand:
    """What PyTorch had in each call whose numbers do not tell their call."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._prints: dict[str, Fingerprint] = {}
        self._indexes: dict[tuple[ModuleCall, int], Index[str]] = {}

    @cached_property
    def _computed(self) -> dict[ModuleCall, Index[Fingerprint]]:
        found: dict[ModuleCall, Index[Fingerprint]] = defaultdict(Index)
        for call, one in {(one.call, one.fingerprint): None for one in self._evidence.quiet}:
            found[call].add(one, one)
        return found

    @cached_property
    def _passing(self) -> dict[tuple[ModuleCall, int], set[str]]:
        """The contents of a size that each call gets, and that calls in it get and return."""
        found: dict[tuple[ModuleCall, int], set[str]] = defaultdict(set)
        for tensor in self._evidence.tensors:
            around = self._evidence.parents.get(tensor.call)
            those: Sequence[ModuleCall | None] = [tensor.call, around] if tensor.side == "inputs" else [around]
            for call in those if "float" in tensor.dtype else ():
                if call is not None:
                    found[call, prod(tensor.shape)].add(tensor.content)
        return found

    def has(self, call: ModuleCall, own: Fingerprint) -> bool:
        """Whether a call computed, got or passed on such numbers."""
        if any(True for _ in self._computed[call].near(own, _NEAR)):
            return True
        return any(True for _ in self._passing_of(call, own.size).near(own, _NEAR))

    def _passing_of(self, call: ModuleCall, size: int) -> Index[str]:
        """The contents of a size that pass through a call, by their fingerprints, which are made when asked for."""
        if (call, size) not in self._indexes:
            index = self._indexes[call, size] = Index()
            for content in self._passing.get((call, size), ()):
                index.add(self._print_of(content), content)
        return self._indexes[call, size]

    def _print_of(self, content: str) -> Fingerprint:
        if content not in self._prints:
            self._prints[content] = fingerprint_of(self._evidence.array(content))
        return self._prints[content]

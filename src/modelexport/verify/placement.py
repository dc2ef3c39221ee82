"""Checks by numbers, without the sidecar, that the tags name the calls in which PyTorch computed the nodes' values.

The value of a node is looked up among the results of all operations of the PyTorch run. If it appears, but not in a
call that owns the node in the file, the node is misplaced. A value that does not appear (an exporter may compute in
other steps) has to lead to values of its call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from modelexport.core.calls import CallTree, ModuleCall
from modelexport.core.owners import Evidence as OwnerEvidence
from modelexport.graph.nodes import nested_graphs
from modelexport.graph.owners import owner_of
from modelexport.runtime.evidence import Evidence
from modelexport.runtime.fingerprints import Fingerprint, Index
from modelexport.verify.crossing import nodes_outside
from modelexport.verify.drawing import random_nodes
from modelexport.verify.ends import Ends
from modelexport.verify.leading import reached_calls
from modelexport.verify.matching import FileRun, paths_called_as_often, tensors_by_call
from modelexport.verify.passed_in import quiet_nodes_of_callers
from modelexport.verify.quiet_values import misplaced_quiet_nodes
from modelexport.verify.recognizing import recognize


@dataclass(frozen=True)
class Misplaced:
    """A node whose tags name other calls than those in which PyTorch computed its value."""

    node: str
    given: tuple[ModuleCall, ...]
    belongs: tuple[ModuleCall, ...]
    computed: bool
    """Whether PyTorch computed its value; otherwise it is what the node takes or leads to that tells."""


def find_misplaced(model: ir.Model, calls: CallTree, run: FileRun, evidence: Evidence) -> list[Misplaced]:
    """The nodes of the main graph whose owners are not the calls in which their values were computed."""
    drawn = random_nodes(model.graph)
    recognized = recognize(model, run, evidence, drawn)
    known, copies = recognized.known, recognized.copies
    unseen = _calls_with_unseen_outputs(calls, run, evidence)
    passing = _calls_with_unseen_outputs(calls, run, evidence, passed=True)
    several = any((owner := owner_of(node)) is not None and len(owner.calls) > 1 for node in model.graph)
    gone = _calls_with_lost_values(run, evidence, calls) if several else frozenset()
    ends = Ends(run, evidence)
    order = {call: index for index, call in enumerate(evidence.parents)}
    reached = reached_calls(model, known, recognized.made, run, evidence, recognized.again)
    found = []
    for node in model.graph:
        owner = owner_of(node)
        if owner is None or not _telling(node, run) or (node in drawn and node not in known):
            continue
        right = known.get(node) or reached.get(node, frozenset())
        near = right
        beyond = passing if node in copies else unseen
        asked = beyond.intersection(owner.calls)
        leading = {call for call in asked if any(_may_lead_to(call, r, calls, order) for r in right)}
        if node not in copies and owner.evidence is OwnerEvidence.EXACT and len(owner.calls) == 1:
            leading = {call for call in leading if any(ends.may_lead_to(call, r, calls) for r in right)}
        if node in copies:
            near = near | copies[node] | reached.get(node, frozenset())
            near = near | _around(node, known) | _users(node, known)
        near = near | (_alike(node, right, known, copies) if node in known else leading)
        wrong: Sequence[ModuleCall] = [] if owner.call in near else owner.calls
        if len(owner.calls) > 1:
            # A node fused from several calls also computes what the others did; the file does not have that as a value.
            beside = _around(node, known) | _users(node, known) | leading | _passed(node, run, recognized.travels)
            if owner.evidence is not OwnerEvidence.EXACT:
                also = near | beside | ends.before(right) | _owners_of_quiet(node, run)
                wrong = wrong if not near & set(owner.calls) else []
            elif node in copies:
                also = near
            else:
                also = right | (beside & gone) - ends.apart_from(node, run)
                outside = _taken_from_outside(node, right, known, run, calls) if node in known else [""]
                also -= {call for call in also - right if ends.meet(call, right, calls, outside)}
            wrong = wrong or [call for call in owner.calls if call not in also]
        if right and wrong:
            found.append(Misplaced(node.name or "", tuple(wrong), tuple(sorted(right)), node in known))
    leads = partial(_may_lead_to, calls=calls, order=order)
    quiet = misplaced_quiet_nodes(model, calls, run, evidence, reached, unseen, leads)
    found += [
        Misplaced(node.name or "", tuple(those), tuple(sorted(right)), False)
        for node, those, right in quiet
        if node not in drawn
    ]
    found += _far_from_random_numbers(model, drawn - known.keys(), calls, evidence)
    told = {one.node for one in found}
    found += [
        Misplaced(node.name or "", tuple(those), tuple(sorted(right)), False)
        for node, those, right in quiet_nodes_of_callers(model, calls, run, evidence)
        if node not in drawn and node.name not in told
    ]
    told = {one.node for one in found}
    computed = {node: those for node, those in known.items() if node not in copies}
    for node, those, right in nodes_outside(model, calls, run, evidence, computed):
        if node.name not in told and node not in drawn:
            found.append(Misplaced(node.name or "", tuple(those), tuple(sorted(right)), node in known))
    return found


def _far_from_random_numbers(
    model: ir.Model, nodes: Collection[ir.Node], calls: CallTree, evidence: Evidence
) -> Iterator[Misplaced]:
    """Those of some nodes that depend on random numbers, but whose call computed nothing from such.

    No value tells more of them. A call that PyTorch made another number of times may compute what another one did.
    """
    if evidence.random.calls is None:
        return
    near = {around for call in evidence.random.calls if call in calls for around in calls.stack(call)}
    same = paths_called_as_often(calls, evidence)
    for node in model.graph:
        owner = owner_of(node) if node in nodes else None
        if owner is None or owner.evidence is not OwnerEvidence.EXACT or nested_graphs(node):
            continue
        wrong = [call for call in owner.calls if call not in near and call.path in same]
        if wrong:
            yield Misplaced(node.name or "", tuple(wrong), tuple(sorted(evidence.random.calls)), False)


def _owners_of_quiet(node: ir.Node, run: FileRun) -> frozenset[ModuleCall]:
    """The owners of the nodes that compute inputs of a node that do not tell a call: what was fused may be of these."""
    producers = (value.producer() for value in node.inputs if value is not None)
    owners = (owner_of(one) for one in producers if one is not None and not _telling(one, run))
    return frozenset(call for owner in owners if owner is not None for call in owner.calls)


def _passed(node: ir.Node, run: FileRun, travels: Mapping[str, frozenset[ModuleCall]]) -> frozenset[ModuleCall]:
    """The calls that get, pass or return what a node takes or gives."""
    names = [value.name or "" for value in (*node.inputs, *node.outputs) if value is not None]
    return frozenset(call for name in names for call in travels.get(run.contents.get(name, ""), ()))


def _calls_with_lost_values(run: FileRun, evidence: Evidence, calls: CallTree) -> frozenset[ModuleCall]:
    """The calls that computed something that the file does not have as a value, and those around them."""
    index: Index[Fingerprint] = Index()
    for own in run.prints.values():
        index.add(own, own)
    lost = {
        operation.call
        for operation in evidence.computed
        if operation.new and not any(operation.fingerprint.near(own) for own in index.near(operation.fingerprint))
    }
    lost |= {tensor.call for tensor in evidence.random.tensors}
    unknown = {traced.call for traced in calls if traced.call not in evidence.parents}
    return frozenset(unknown | {around for call in lost if call in calls for around in calls.stack(call)})


def _may_lead_to(call: ModuleCall, other: ModuleCall, calls: CallTree, order: Mapping[ModuleCall, int]) -> bool:
    """Whether what a call computes can be a part of what another does: it began before it, or inside it."""
    if call not in order or other not in order or order[call] <= order[other]:
        return True
    return call in calls and other in calls.stack(call)


def _alike(
    node: ir.Node,
    right: frozenset[ModuleCall],
    known: Mapping[ir.Node, frozenset[ModuleCall]],
    copies: Collection[ir.Node],
) -> frozenset[ModuleCall]:
    """The calls that computed what follows from a node, as those did that computed the node's value.

    Of two calls that compute the same, PyTorch may show the value in one only: ``torch.vmap`` takes a layer apart. What
    only moves the elements tells nothing: it may be in any call that the value passes.
    """
    users = [known.get(user, frozenset()) for user in _computing_users(node, copies)]
    alike = users[0].intersection(*users) if users else frozenset()
    return alike if alike & right else frozenset()


def _computing_users(node: ir.Node, copies: Collection[ir.Node]) -> Iterator[ir.Node]:
    """The first nodes after a node that do not only move elements."""
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        for user in (user for value in current.outputs for user, _ in value.uses() if user not in seen):
            seen.add(user)
            if user in copies:
                pending.append(user)
            else:
                yield user


def _users(node: ir.Node, known: Mapping[ir.Node, frozenset[ModuleCall]]) -> frozenset[ModuleCall]:
    """The owners of the users of a node's values, for values that do not identify a call themselves."""
    users = {user for value in node.outputs for user, _ in value.uses() if user not in known}
    owners = (owner_of(user) for user in users)
    return frozenset(call for owner in owners if owner is not None for call in owner.calls)


def _around(node: ir.Node, known: Mapping[ir.Node, frozenset[ModuleCall]]) -> frozenset[ModuleCall]:
    """The calls that compute a node's inputs."""
    producers = (value.producer() for value in node.inputs if value is not None)
    return frozenset(call for producer in producers if producer is not None for call in known.get(producer, ()))


def _taken_from_outside(
    node: ir.Node,
    right: Collection[ModuleCall],
    known: Mapping[ir.Node, frozenset[ModuleCall]],
    run: FileRun,
    calls: CallTree,
) -> list[str]:
    """The contents of what a node takes, but for what is computed in the call that computes it; an empty text
    if unknown."""
    found = []
    for value in node.inputs:
        if value is None or value.is_initializer():
            continue
        producer = value.producer()
        made = known.get(producer, frozenset[ModuleCall]()) if producer is not None else frozenset()
        inside = all(call in calls and not set(right).isdisjoint(calls.stack(call)) for call in made)
        if not made or not inside or len(right) > 1:
            found.append(run.contents.get(value.name or "", ""))
    return found


def _telling(node: ir.Node, run: FileRun) -> bool:
    prints = [run.prints.get(value.name or "") for value in node.outputs]
    return any(one is not None and one.telling for one in prints)


def _calls_with_unseen_outputs(
    calls: CallTree, run: FileRun, evidence: Evidence, *, passed: bool = False
) -> set[ModuleCall]:
    """The calls whose outputs are not values of the file, so that the end of their nodes is not known.

    Args:
        passed: Those too that only pass on, in another shape, what they get.
    """
    seen: Collection[str] = set(run.contents.values())
    returned, given = tensors_by_call(evidence, "outputs"), tensors_by_call(evidence, "inputs")
    found = {tensor.call for tensor in evidence.random.tensors if tensor.side == "outputs"}
    for traced in calls:
        call = traced.call
        taken = set() if passed else {tensor.content for tensor in given.get(call, [])}
        if call not in evidence.parents or any(
            tensor.content not in seen and tensor.content not in taken for tensor in returned.get(call, [])
        ):
            found.add(call)
    return found

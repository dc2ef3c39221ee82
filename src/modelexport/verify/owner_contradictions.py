"""Confirms which call each node belongs to.

The front end knows which call made a node. PyTorch's run confirms it in two ways: a node whose value PyTorch computed
belongs to one of the calls in which it did, and a value that leaves the nodes of a call is a tensor that PyTorch
computed. All others are *not confirmable*: conditions, sizes, constants, and steps that only the exporter takes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.owners import Evidence
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import nested_graphs
from modelexport.graph.operator_kinds import MOVES_ELEMENTS
from modelexport.traces.trace import Content
from modelexport.verify.matched_values import Matches
from modelexport.verify.verify_report import OwnerCounts

OwnerState = Literal["confirmed", "contradicted", "not confirmable"]


class Contradiction(NamedTuple):
    """A node that is given to a call that did not compute its value."""

    node: ir.Node
    call: ModuleCall
    reason: str


def check_owners(matches: Matches) -> tuple[OwnerCounts, list[Contradiction]]:
    """The counts, and the contradicted nodes in the order of the graph."""
    contradictions, confirmed, open_ = [], 0, 0
    for node in matches.tagged.nodes:
        state, reason = _state(matches, node)
        if state == "contradicted" and matches.trace.ties:  # another choice puts rows in another order
            state = "not confirmable"
        owner = owner_of(node)
        if state == "contradicted" and owner is not None:
            contradictions.append(Contradiction(node, owner.call, reason))
        confirmed += state == "confirmed"
        open_ += state == "not confirmable"
    return OwnerCounts(confirmed=confirmed, contradicted=len(contradictions), not_confirmable=open_), contradictions


def _state(matches: Matches, node: ir.Node) -> tuple[OwnerState, str]:
    owner = owner_of(node)
    if owner is None or nested_graphs(node) or _is_of_parameters(node):
        return "not confirmable", ""
    for value in node.outputs:
        if not matches.is_telling(value) or value not in matches.right:  # what a wrong value leads to tells no call
            continue
        if value in matches.sizes and matches.trace.prints[value][0].size == 1:  # numbers of Python are of no call
            continue
        contents = matches.equal_in_any_order.get(value, [])
        if not contents:
            if (other := _crossing(matches, node, value)) is not None:
                return "contradicted", f"{value.name} leaves it for {other}, and PyTorch has no such tensor"
            continue
        calls = {call for content in contents for call in content.computed}
        numbered = {call.path for call in calls} & matches.called_less_in_pytorch
        wrong = [call for call in owner.calls if _traced(matches, call) not in calls and call.path not in numbered]
        if wrong and (not calls or _moves(matches, node, value)):  # elements may be moved before a call or in it
            continue
        if wrong and all(_is_part_of_a_step_after(matches, call, calls) for call in wrong):
            continue
        if wrong and _is_earlier(matches, value, owner.calls, contents):
            continue
        others = (user for content in contents for user in matches.computing.get(content, ()) if user is not node)
        if wrong and any(its is not None and not calls.isdisjoint(its.calls) for its in map(owner_of, others)):
            continue  # another node is what PyTorch computes there, and this one happens to be equal
        if len(wrong) == len(owner.calls) or (wrong and owner.evidence is Evidence.EXACT):
            named = ", ".join(sorted(str(call) for call in calls)[:3])
            return "contradicted", f"PyTorch computes {value.name} in {named}, not in {wrong[0]}"
        return "confirmed", ""
    return "not confirmable", ""


_BETWEEN_CALLS = MOVES_ELEMENTS | {"Concat", "Constant", "Gather", "Slice", "Split"}
"""Operators for which exporters write what a model does to tensors and parameters between calls. What repeats elements
or picks them by several indices is checked like what computes: PyTorch does it in the call that owns the node."""


def _traced(matches: Matches, call: ModuleCall) -> ModuleCall:
    """The call in which PyTorch shows what a call computes: one around it, if hooks did not see it in a branch."""
    around = reversed(matches.tagged.calls.stack(call))
    return next((each for each in around if each in matches.reference.parents), call)


def _is_of_parameters(node: ir.Node) -> bool:
    """Whether a node gives a constant, or parts of parameters: these are not computed in any call."""
    pending = [node]
    while pending:
        node_before = pending.pop()
        if node_before.op_type not in _BETWEEN_CALLS:
            return False
        for value in node_before.inputs:
            if value is not None and not value.is_initializer():
                producer = value.producer()
                if producer is None:
                    return False
                pending.append(producer)
    return True


def _moves(matches: Matches, node: ir.Node, value: ir.Value) -> bool:
    """Whether a node only moves elements: its value has those of one that it takes, or some of them."""
    if node.op_type in _BETWEEN_CALLS:
        return True
    results = matches.trace.prints[value]
    return any(
        first.equal_in_any_order(second, matches.allowed_error(value))
        for taken in node.inputs
        if taken is not None
        for first, second in zip(matches.trace.prints.get(taken, ()), results, strict=False)
    )


def _is_earlier(
    matches: Matches, value: ir.Value, owners: Collection[ModuleCall], contents: Collection[Content]
) -> bool:
    """Whether its owners computed what the file makes of a value before PyTorch had an equal one: they took a step that
    PyTorch does not take, and the equal tensor is another.
    """
    computed_contents = (
        content
        for user in _users(value)
        for output in user.outputs
        for content in matches.equal_in_order.get(output, ())
    )
    order = [matches.order[content] for content in computed_contents if not content.computed.keys().isdisjoint(owners)]
    return min(order, default=len(matches.order)) < min(matches.order[content] for content in contents)


def _is_part_of_a_step_after(matches: Matches, call: ModuleCall, calls: Collection[ModuleCall]) -> bool:
    """Whether the file has no value that a call computes, and its node computes one of a call around it: tools put a
    step that follows, as a scale of attention, into the weight.
    """
    return call not in matches.computed_calls and any(around in calls for around in matches.tagged.calls.stack(call))


def _crossing(matches: Matches, node: ir.Node, value: ir.Value) -> ModuleCall | None:
    """The call of another node that uses a value which PyTorch does not have, or makes it from such a one.

    Nodes with several owners, and those whose owners were derived, may be made of the steps of several calls.
    """
    owner = owner_of(node)
    if owner is None or not _is_exact(node):
        return None
    for user in _users(value):
        other = owner_of(user)
        if other is not None and _is_exact(user) and other.call != owner.call:
            return other.call
    return None


def _is_exact(node: ir.Node) -> bool:
    owner = owner_of(node)
    return owner is not None and len(owner.calls) == 1 and owner.evidence is Evidence.EXACT


def _users(value: ir.Value) -> Iterator[ir.Node]:
    return (user for user, _ in value.uses() if not nested_graphs(user))

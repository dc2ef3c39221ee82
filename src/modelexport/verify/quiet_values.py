"""Nodes whose values do not tell their call, as a mask of ones: by what they lead to, and by who may make them.

Such a value may be computed in one call and used in another: one that returns what does not tell its call either, or
what the file does not have, or that the others run in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import onnx_ir as ir

from modelexport.core.calls import CallTree, ModuleCall
from modelexport.core.owners import Evidence as OwnerEvidence
from modelexport.graph.nodes import nested_graphs
from modelexport.graph.owners import owner_of
from modelexport.runtime.evidence import Evidence
from modelexport.runtime.fingerprints import has_several
from modelexport.verify.matching import FileRun, tensors_by_call

Calls = frozenset[ModuleCall]


def misplaced_quiet_nodes(
    model: ir.Model,
    calls: CallTree,
    run: FileRun,
    evidence: Evidence,
    reached: Mapping[ir.Node, Calls],
    unseen: set[ModuleCall],
    may_lead_to: Callable[[ModuleCall, ModuleCall], bool],
) -> Iterator[tuple[ir.Node, list[ModuleCall], Calls]]:
    """Nodes that lead only to values of other calls, with the wrong owners and those calls.

    What other owners than exact ones have may be that of the nodes beside them, with which a tool merged them.

    Args:
        reached: For every node the calls of the first values with a known call that it leads to.
        unseen: The calls whose outputs are not values of the file.
        may_lead_to: Whether what a call computes can be a part of what another does.
    """
    quiet: set[ModuleCall] | None = None
    deciding = _deciding(model.graph)
    for node in model.graph:
        owner, right = owner_of(node), reached.get(node, frozenset())
        own = run.prints.get(node.outputs[0].name or "")
        if owner is None or not right or own is None:
            continue
        if own.telling or ((own.kind != "f" or own.size < _LEAST) and node not in deciding):
            continue
        near = right | {around for call in right if call in calls for around in calls.stack(call)}
        if owner.evidence is not OwnerEvidence.EXACT:
            near |= set(_owners_beside(node))
        if all(call in near for call in owner.calls):
            continue
        quiet = unseen | _quiet_calls(evidence) if quiet is None else quiet
        wrong = [
            call
            for call in owner.calls
            if call not in near and not (call in quiet and any(may_lead_to(call, one) for one in right))
        ]
        if wrong:
            yield node, wrong, right


_LEAST = 4


def _deciding(graph: ir.Graph) -> set[ir.Node]:
    """The nodes that compute only whether a branch is taken, or a loop goes on: they belong to those who ask."""
    found: set[ir.Node] = set()

    def decides(user: ir.Node, place: int) -> bool:
        return user in found or (bool(nested_graphs(user)) and place == _CONDITION.get(user.op_type))

    for node in reversed(graph):
        uses = [use for value in node.outputs for use in value.uses()]
        if (
            uses
            and all(decides(user, place) for user, place in uses)
            and not any(value.is_graph_output() for value in node.outputs)
        ):
            found.add(node)
    return found


_CONDITION = {"If": 0, "Loop": 1}
"""The input of each operator that decides."""


def _owners_beside(node: ir.Node) -> Iterator[ModuleCall]:
    producers = (value.producer() for value in node.inputs if value is not None)
    users = (user for value in node.outputs for user, _ in value.uses())
    for other in (*producers, *users):
        owner = owner_of(other) if other is not None else None
        yield from owner.calls if owner is not None else ()


def _quiet_calls(evidence: Evidence) -> set[ModuleCall]:
    """The calls that return something that does not tell them."""
    return {
        call
        for call, tensors in tensors_by_call(evidence, "outputs").items()
        for tensor in tensors
        if not has_several(evidence.array(tensor.content))
    }

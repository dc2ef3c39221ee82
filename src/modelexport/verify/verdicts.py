"""The verdict on each call of a file, and the reason for it, from two runs that were compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.graph.node_owners import owner_of
from modelexport.tagged.file import TaggedFile
from modelexport.traces.array_differences import Difference, Verdict
from modelexport.verify.compared_runs import Compared
from modelexport.verify.matched_values import telling_outputs
from modelexport.verify.owner_contradictions import Contradiction
from modelexport.verify.verify_report import CallStatus, CallVerdict


def verdicts_of(compared: Compared, chosen: Sequence[ModuleCall] = ()) -> list[CallVerdict]:
    """The verdicts on the calls of a file, in the order in which they began; of all, or of those chosen."""
    tagged = compared.end_to_end.tagged
    nodes_of_calls: dict[ModuleCall, int] = {}
    for node in tagged.nodes:
        owner = owner_of(node)
        for call in owner.calls if owner is not None else ():
            nodes_of_calls[call] = nodes_of_calls.get(call, 0) + 1
    contradicted: dict[ModuleCall, Contradiction] = {}
    for contradiction in compared.contradictions:
        contradicted.setdefault(contradiction.call, contradiction)
    shown = [
        traced.call
        for traced in tagged.calls
        if not chosen or not set(chosen).isdisjoint(tagged.calls.stack(traced.call))
    ]
    return [_call_verdict(compared, call, nodes_of_calls.get(call, 0), contradicted.get(call)) for call in shown]


def _call_verdict(compared: Compared, call: ModuleCall, nodes: int, contradiction: Contradiction | None) -> CallVerdict:
    tagged, located = compared.end_to_end.tagged, compared.located
    facts: dict[str, Any] = {"address": call.address, "tag": tagged.tags[call], "nodes": nodes}
    facts["end_to_end"] = _worst(compared, call, replaced=False)
    facts["per_module"] = _worst(compared, call, replaced=True)
    failed = compared.failed
    if failed is not None and failed.call == call:
        return CallVerdict(**facts, status="differ", reason=str(failed), **_node(tagged, failed.node))
    blamed = located.blamed.get(call)
    positions = {node: place for place, node in enumerate(tagged.nodes)} if blamed or contradiction else {}
    if contradiction is not None and (blamed is None or positions[contradiction.node] <= positions[blamed[0]]):
        reason = f"node {contradiction.node.name} is not of this call: {contradiction.reason}"
        return CallVerdict(**facts, status="differ", reason=reason, **_node(tagged, contradiction.node))
    if blamed is not None:
        return CallVerdict(**facts, status="differ", reason=blamed[1], **_node(tagged, blamed[0]))
    status, reason = _state(compared, call, nodes)
    return CallVerdict(**facts, status=status, reason=reason)


def _state(compared: Compared, call: ModuleCall, nodes: int) -> tuple[CallStatus, str]:
    """The status of a call that is not to blame for anything."""
    matches, tagged = compared.per_module, compared.end_to_end.tagged
    if not any(True for _ in tagged.nodes_of(call)):
        return "no nodes", ""
    if call not in matches.reference.parents:
        return "not compared", "PyTorch did not run this call with these inputs"
    ties = [node for node in matches.trace.ties if (owner := owner_of(node)) is not None and owner.call == call]
    if ties:
        return "tie", f"{ties[0].name} chose other elements of equal scores"
    returned = matches.reference.side(call, "outputs")
    if returned and not any(tensor.content.fingerprint.size for tensor in returned):
        return "not compared", "with these inputs what it returns has no elements"
    tensors = telling_outputs(matches.reference, call)
    if any(t.content not in matches.found for t in tensors) and not any(
        pair.place.call == call for pair in compared.located.pairs.values()
    ):
        reason = _not_compared(compared, tagged.boundaries[call].outputs)
        return ("not compared", reason) if reason else ("agree", "")
    return "agree", ""


def _not_compared(compared: Compared, outputs: Iterable[ir.Value]) -> str:
    """Why PyTorch's outputs of a call are not among the file's values; empty if another of its outputs is right."""
    matches = compared.per_module
    if any(matches.is_random(value) for value in outputs):
        return "what it returns depends on random numbers"
    values = [value for value in outputs if value in matches.trace.prints]
    if not values:
        return str(compared.unknown or "the file does not compute it with these inputs")
    if any(value in matches.right for value in values):
        return ""
    first = {matches.first_suspect(value) for value in values}
    for wrong, (node, _) in compared.located.blamed.items():
        if node in first:
            return f"what it returns is computed from what differs in {wrong}"
    return "what it returns is not a value of the file: it was fused or folded"


def _node(tagged: TaggedFile, node: ir.Node) -> dict[str, Any]:
    owner = owner_of(node)
    line = owner.line if owner is not None else ""
    return {"first_node": node.name or "", "line": line, "position": tagged.nodes.index(node)}


def _worst(compared: Compared, call: ModuleCall, *, replaced: bool) -> Difference | None:
    """The worst of the tensors that a call returns."""
    matches, located = compared.end_to_end if not replaced else compared.per_module, compared.located
    differences: list[Difference] = []
    wrong = {item.content: value for value, item in located.pairs.items()}
    for tensor in matches.reference.side(call, "outputs"):
        content = tensor.content
        facts: dict[str, Any] = {"name": tensor.place.name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
        if content in wrong:
            value = wrong[content]
            error = located.errors[value]
            if not replaced:
                error = matches.relative_distance(value, tensor)
            status: Verdict = "agree" if error <= matches.allowed_error(value) else "differ"
            differences.append(Difference(**facts, status=status, relative=error, allowed=matches.allowed_error(value)))
        elif content in matches.nearest:
            value, error = matches.nearest[content]
            differences.append(
                Difference(**facts, status="agree", relative=error, allowed=matches.allowed_error(value))
            )
    return max(differences, key=lambda item: item.relative or 0.0, default=None)

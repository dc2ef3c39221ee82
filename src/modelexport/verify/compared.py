"""One run of PyTorch and of the file on the same inputs, compared call by call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from modelexport.core.calls import ROOT, ModuleCall
from modelexport.graph.kept_outputs import requested_outputs
from modelexport.graph.node_owners import owner_of
from modelexport.tagged.file import TaggedFile
from modelexport.traces.differences import Difference, Verdict
from modelexport.traces.file_run import FileRun
from modelexport.traces.file_trace import exact_constants, measure_noise, measure_rounding, trace_file
from modelexport.traces.trace import SeenTensor, Trace
from modelexport.verify.contradictions import Contradiction, check_owners
from modelexport.verify.located import Located, find_pairs, locate, replacements
from modelexport.verify.matches import Matches, telling_outputs
from modelexport.verify.verify_report import CallVerdict, OwnerCounts


@dataclass(eq=False)
class Compared:
    """What the two runs show."""

    end_to_end: Matches
    per_module: Matches
    """The run in which wrong values were replaced; the same one if there are none."""
    located: Located
    owners: OwnerCounts
    contradictions: list[Contradiction] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.located.pairs or self.contradictions or self.end_to_end.trace.failed)


def compare_runs(
    tagged: TaggedFile,
    run: FileRun,
    inputs: Mapping[str, Any],
    truth: Trace,
    weights: Mapping[ir.Value, Any],
    own: Callable[[], Trace] | None = None,
) -> Compared:
    """Run a file and compare it with a run of PyTorch.

    Args:
        inputs: Names of the file's inputs to arrays.
        truth: The run of PyTorch.
        weights: Initializers to other arrays for them.
        own: Gives the run of PyTorch in the types of the model, whose results some constants of the file may be.
    """
    exact = exact_constants(run, truth, weights)
    found = _compare(tagged, run, inputs, truth, {**weights, **exact})
    if found.agrees or own is None:
        return found
    more = exact_constants(run, truth, weights, own())
    return _compare(tagged, run, inputs, truth, {**weights, **more}) if more.keys() != exact.keys() else found


def _compare(
    tagged: TaggedFile, run: FileRun, inputs: Mapping[str, Any], truth: Trace, constants: Mapping[ir.Value, Any]
) -> Compared:
    trace = trace_file(run, inputs, truth, constants=constants)

    def compared(noise: Mapping[ir.Value, float], rounding: Mapping[ir.Value, float]) -> Compared:
        matches = Matches(tagged, truth, trace, noise, rounding)
        pairs = find_pairs(matches, outputs_of(tagged, truth))
        again = matches
        if pairs:
            replaced = trace_file(run, inputs, truth, constants=constants, replace=replacements(pairs))
            again = Matches(tagged, truth, replaced, noise, rounding)
        located = locate(again, pairs)
        owners, contradictions = check_owners(again)
        # What follows from a wrong node tells nothing of owners.
        return Compared(matches, again, located, owners, [] if located.blamed else contradictions)

    strict = compared({}, {})
    if strict.agrees or trace.failed is not None:
        return strict
    # The constants that the file has rounded may be why; they are not if as many calls are wrong beyond their rounding.
    noise, rounding = (
        measure(run, inputs, truth, trace, constants=constants) for measure in (measure_noise, measure_rounding)
    )
    loose = compared(noise, rounding)
    return strict if 0 < len(strict.located.blamed) <= len(loose.located.blamed) else loose


def outputs_of(tagged: TaggedFile, truth: Trace) -> list[tuple[ir.Value, SeenTensor]]:
    """The outputs of a file, each with what the model returned in its place."""
    returned = requested_outputs(tagged.model.metadata_props, truth.side(ROOT, "outputs"))
    returned = [
        tensor
        for tensor in returned
        if tensor.content.fingerprint.size or len(returned) == len(tagged.model.graph.outputs)
    ]
    return list(zip(tagged.model.graph.outputs, returned, strict=False))


def output_differences(compared: Compared) -> list[Difference]:
    """The outputs in float64."""
    matches, found = compared.end_to_end, []
    for value, tensor in outputs_of(matches.tagged, matches.truth):
        facts: dict[str, Any] = {"name": value.name or "", "dtype": tensor.dtype, "shape": list(tensor.shape)}
        if value in compared.located.pairs:
            error = compared.located.errors[value]
            reason = f"it is off by {error:.1e} of its size" if error < float("inf") else "it is not PyTorch's"
            found.append(Difference(**facts, status="differ", reason=reason, relative=error))
        elif matches.is_random(value):
            found.append(Difference(**facts, status="not compared", reason="it depends on random numbers"))
        else:
            found.append(Difference(**facts, status="tie" if matches.trace.ties else "agree"))
    return found


def verdicts_of(compared: Compared, chosen: Sequence[ModuleCall] = ()) -> list[CallVerdict]:
    """The verdicts on the calls of a file, in the order in which they began; of all, or of those chosen."""
    tagged = compared.end_to_end.tagged
    own: dict[ModuleCall, int] = {}
    for node in tagged.nodes:
        owner = owner_of(node)
        for call in owner.calls if owner is not None else ():
            own[call] = own.get(call, 0) + 1
    contradicted: dict[ModuleCall, Contradiction] = {}
    for one in compared.contradictions:
        contradicted.setdefault(one.call, one)
    shown = [
        traced.call
        for traced in tagged.calls
        if not chosen or not set(chosen).isdisjoint(tagged.calls.stack(traced.call))
    ]
    return [_verdict(compared, call, own.get(call, 0), contradicted.get(call)) for call in shown]


def _verdict(compared: Compared, call: ModuleCall, nodes: int, contradiction: Contradiction | None) -> CallVerdict:
    tagged, located = compared.end_to_end.tagged, compared.located
    facts: dict[str, Any] = {"address": call.address, "tag": tagged.tags[call], "nodes": nodes}
    facts["end_to_end"] = _worst(compared, call, replaced=False)
    facts["per_module"] = _worst(compared, call, replaced=True)
    failed = compared.end_to_end.trace.failed
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


def _state(compared: Compared, call: ModuleCall, nodes: int) -> tuple[Any, str]:
    """The status of a call that is not to blame for anything."""
    matches, tagged = compared.per_module, compared.end_to_end.tagged
    if not any(True for _ in tagged.nodes_of(call)):
        return "no nodes", ""
    if call not in matches.truth.parents:
        return "not compared", "PyTorch did not run this call with these inputs"
    ties = [node for node in matches.trace.ties if (owner := owner_of(node)) is not None and owner.call == call]
    if ties:
        return "tie", f"{ties[0].name} chose other elements of equal scores"
    tensors = telling_outputs(matches.truth, call)
    if any(t.content not in matches.found for t in tensors) and not any(
        one.tensor.place.call == call for one in compared.located.pairs.values()
    ):
        if any(matches.is_random(value) for value in tagged.boundaries[call].outputs):
            return "not compared", "what it returns depends on random numbers"
        values = [value for value in tagged.boundaries[call].outputs if value in matches.trace.prints]
        if values and not any(value in matches.right for value in values):
            first = {matches.first_suspect(value) for value in values}
            for wrong, (node, _) in compared.located.blamed.items():
                if node in first:
                    return "not compared", f"what it returns is computed from what differs in {wrong}"
            return "not compared", "what it returns is not a value of the file: it was fused or folded"
        if not values:
            return "not compared", "the file does not compute it with these inputs"
    return "agree", ""


def _node(tagged: TaggedFile, node: ir.Node) -> dict[str, Any]:
    return {"first_node": node.name or "", "position": tagged.nodes.index(node)}


def _worst(compared: Compared, call: ModuleCall, *, replaced: bool) -> Difference | None:
    """The worst of the tensors that a call returns."""
    matches, located = compared.end_to_end if not replaced else compared.per_module, compared.located
    found: list[Difference] = []
    wrong = {one.tensor.content: value for value, one in located.pairs.items()}
    for tensor in matches.truth.side(call, "outputs"):
        content = tensor.content
        facts: dict[str, Any] = {"name": tensor.place.name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
        if content in wrong:
            value = wrong[content]
            error = located.errors[value]
            if not replaced:
                error = matches.error_of(value, tensor)
            status: Verdict = "agree" if error <= matches.room(value) else "differ"
            found.append(Difference(**facts, status=status, relative=error, allowed=matches.room(value)))
        elif content in matches.nearest:
            value, error = matches.nearest[content]
            found.append(Difference(**facts, status="agree", relative=error, allowed=matches.room(value)))
    return max(found, key=lambda one: one.relative or 0.0, default=None)

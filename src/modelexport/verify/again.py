"""Compares the calls again where the first comparison shows less: own weights, other inputs, larger numbers inside."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.graph.nodes import nested_graphs
from modelexport.graph.owners import owner_of
from modelexport.pytorch.exact_run import RoundedOtherwise
from modelexport.pytorch.replaced_tensors import replaced_tensors, spread_array
from modelexport.runtime.evidence import Evidence, Place, Replaced
from modelexport.surgery.repeating import values_taken
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.verify.calls import verdicts_of
from modelexport.verify.drawing import draws_numbers
from modelexport.verify.failing import Failure, find_failure
from modelexport.verify.feeding import under_names
from modelexport.verify.idle import wrong_idle_nodes
from modelexport.verify.outputs import Inputs, ModelRuns, Tell, WholeComparison
from modelexport.verify.proof import Proof
from modelexport.verify.proving import prove_calls
from modelexport.verify.randomness import without_random
from modelexport.verify.verdicts import CallVerdict


def with_own_weights(
    calls: list[CallVerdict],
    proof: Proof,
    inputs: Inputs,
    whole: WholeComparison,
    runs: ModelRuns,
    chosen: Sequence[ModuleCall],
    tell: Tell,
) -> list[CallVerdict]:
    """Compare the calls with the model's own weights, too, if its outputs differ: others may hide a wrong epsilon."""
    if not whole.perturbed or whole.optimizer or not any(one.status == "differ" for one in whole.outputs):
        return calls
    tell("verify: every call, with the model's own weights")
    own = read_tagged(runs.tagged.path)  # the weights of the other were changed in memory
    again = prove_calls(own, whole.given, runs.observed(inputs, {}), provider=proof.provider, modules=chosen)
    return _worst(calls, verdicts_of(again, chosen), _OWN)


_OWN = "the model's own weights"


def on_other_inputs(
    calls: list[CallVerdict],
    proof: Proof,
    whole: WholeComparison,
    runs: ModelRuns,
    chosen: Sequence[ModuleCall],
    tell: Tell,
) -> list[CallVerdict]:
    """Compare the calls on the variations of the inputs on which the outputs differ, too; the worst verdict counts.

    Where numbers only decide which one is the largest, or whether it is above a limit, the outputs show few of their
    differences: then also on those on which they agree. Outputs are compared with the model's own weights. If no call
    differs with changed ones, these are used here, too.
    """
    decides = _decides_alone(runs.tagged.model)
    wanted = ("differ", "agree", "tie") if decides else ("differ",)
    for one in (one for one in whole.others.compared if one.status in wanted):
        tell(f"verify: every call, with {one.what}")
        other = whole.others.inputs[one.what]
        given = under_names(other, [value.name or "" for value in runs.tagged.model.graph.inputs])
        for weights in [whole.perturbed, *([{}] if whole.perturbed else [])]:
            try:
                run = _repeatable(runs, other, weights)
            except Exception:  # what it accepts with its own weights, a model need not accept with changed ones
                continue
            if not one.outputs:
                failure = find_failure(proof, given, run)
                calls = [_failed(call, failure, one.what) for call in calls] if failure is not None else calls
                break
            tagged, what = runs.tagged, one.what
            if weights is not whole.perturbed:
                tagged, what = read_tagged(runs.tagged.path), f"{one.what} and {_OWN}"
            # Where nothing differs the given inputs have shown the tags: small sizes tell fewer calls apart.
            found = _compared(tagged, given, run, proof.provider, chosen, tags=one.status == "differ")
            if any(call.status == "differ" for call in found):
                calls = _worst(calls, found, what)
                break
    return calls


def _repeatable(runs: ModelRuns, inputs: Inputs, weights: Mapping[str, Any]) -> Evidence:
    """A run without what depends on random numbers."""
    run = runs.observed(inputs, weights)
    if not draws_numbers(runs.tagged.model):
        return run
    others = runs.with_other_numbers(inputs, weights)
    return without_random(run, others, runs.tagged.model) or run


def _compared(
    tagged: TaggedFile,
    given: Mapping[str, Any],
    run: Evidence,
    provider: str,
    chosen: Sequence[ModuleCall],
    *,
    tags: bool,
) -> list[CallVerdict]:
    """The verdicts on the calls in another run.

    Args:
        tags: Whether nodes may be misplaced, and not only wrong.
    """
    proof = prove_calls(tagged, given, run, provider=provider, modules=chosen)
    if not tags:
        proof.misplaced.clear()
    return verdicts_of(proof, chosen)


def with_idle_nodes(
    calls: list[CallVerdict], proof: Proof, inputs: Inputs, whole: WholeComparison, runs: ModelRuns, tell: Tell
) -> list[CallVerdict]:
    """Accuse nodes that change nothing on the given inputs, and would wrongly change larger numbers."""

    def run_replaced(others: Mapping[Place, Any], watched: Collection[Place], rounded: bool) -> Replaced:
        tell("verify: larger numbers inside")
        rounding = RoundedOtherwise() if rounded else nullcontext()
        with replaced_tensors(runs.model, others, watched) as run, rounding:
            try:
                runs.outputs_with(inputs, whole.perturbed)
            except Exception as error:  # a model may raise anything for numbers that it does not accept
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                note = f"the model does not accept larger numbers inside, with which idle nodes are tried: {reason}"
                whole.notes.extend([note] if note not in whole.notes else [])
                return Replaced()
        return run

    for name, lost in wrong_idle_nodes(proof, run_replaced, spread_array):
        owner = owner_of(proof.tagged.model.graph.node(name))
        reason = f"{name} makes of larger numbers inside something else than PyTorch"
        if lost is not None:
            reason = f"no node has a bound that PyTorch has for larger numbers inside: {name} makes something else"
        wrong = _nearest(lost, calls, proof) if lost is not None else owner.call.address if owner is not None else None
        told = {"status": "differ", "reason": reason, "first_node": name, "position": proof.positions[name]}
        calls = [msgspec.structs.replace(call, **told) if call.address == wrong else call for call in calls]
    return calls


def _nearest(call: ModuleCall, calls: Sequence[CallVerdict], proof: Proof) -> str | None:
    """The address of a call, or of the innermost around it that a file without the call has."""
    known = {one.address for one in calls}
    around: ModuleCall | None = call
    while around is not None and around.address not in known:
        around = proof.evidence.parents.get(around)
    return around.address if around is not None else None


def _decides_alone(model: ir.Model) -> bool:
    """Whether numbers that a file computes reach outputs only through what they decide, if that."""
    shown: set[ir.Value] = {value for value in model.graph.outputs if _has_numbers(value)}
    computed: set[ir.Value] = {value for value in model.graph.inputs if _has_numbers(value)}
    for node in model.graph:
        if any(value in computed or (value.is_initializer() and _has_numbers(value)) for value in values_taken(node)):
            computed.update(value for value in node.outputs if _has_numbers(value) and value.uses())
    for node in reversed(model.graph):
        steps = node.domain == "" and node.op_type in _STEPS
        if not steps and any(value in shown for value in node.outputs):
            # What a branch depends on is compared itself.
            shown.update(value for value in values_taken(node) if _has_numbers(value) or nested_graphs(node))
    return not computed <= shown


_STEPS = frozenset({"Ceil", "Floor", "Round", "Sign"})
"""Operators whose results most small changes of their inputs do not change."""


def _has_numbers(value: ir.Value) -> bool:
    return value.dtype is None or value.dtype.is_floating_point()


def _failed(call: CallVerdict, failure: Failure, what: str) -> CallVerdict:
    """A verdict on a call, which differs if a failure is in it."""
    if call.address != failure.call.address:
        return call
    reason = f"with {what}: {failure.reason[:300]}"
    return msgspec.structs.replace(
        call, status="differ", reason=reason, first_node=failure.node, position=failure.position
    )


def _worst(calls: Sequence[CallVerdict], others: Sequence[CallVerdict], what: str) -> list[CallVerdict]:
    """The worse of two verdicts on each call, of which the first do not differ."""
    return [
        call if other.status != "differ" else msgspec.structs.replace(other, reason=f"with {what}: {other.reason}")
        for call, other in zip(calls, others, strict=True)
    ]

"""Compares a file with its model: both run on the same inputs, and the differences are returned as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir
from torch import nn

from modelexport.core.calls import ModuleCall
from modelexport.core.garbage import only_new_garbage
from modelexport.core.locking import exclusive
from modelexport.files.linked import check_files
from modelexport.format import documents
from modelexport.graph.nodes import required_inputs
from modelexport.pytorch.perturbation import as_arrays, entries_of
from modelexport.pytorch.prepared import arguments_by_name, prepare_inputs
from modelexport.pytorch.static import module_tree
from modelexport.pytorch.traced import state_remembered
from modelexport.pytorch.values import as_array, as_stored
from modelexport.runtime.sessions import CPU
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tagged.reference import reference_path, write_reference
from modelexport.verify.again import on_other_inputs, with_idle_nodes, with_own_weights
from modelexport.verify.calls import sampled_calls, verdicts_of
from modelexport.verify.claims import false_claims
from modelexport.verify.differences import UNITS
from modelexport.verify.drawing import draws_numbers
from modelexport.verify.feeding import under_names
from modelexport.verify.kept import KeptRuns
from modelexport.verify.outputs import Inputs, ModelRuns, Tell, WholeComparison, compare_whole, run_observed
from modelexport.verify.parameters import (
    check_same_entries,
    compare_parameters,
    differing_buffers,
    parameter_digests,
    put_in,
    users_of,
)
from modelexport.verify.proving import prove_calls
from modelexport.verify.randomness import Repeatable, random_outputs, without, without_random
from modelexport.verify.sampling import verify_alone
from modelexport.verify.verdicts import CallVerdict, ParameterReport, VerifyReport
from modelexport.weights.sources import Weights


@exclusive
def verify(
    model: nn.Module,
    inputs: Inputs,
    path: str | Path,
    *,
    modules: Sequence[str] = (),
    provider: str = CPU,
    sidecar: documents.Hierarchy | None = None,
    weights: Weights | None = None,
    perturb: bool | None = None,
    others: bool = True,
    kept: KeptRuns | None = None,
    tell: Tell = lambda text: None,
) -> VerifyReport:
    """Run a model in PyTorch and its file in ONNX Runtime, and compare every output, every call and every parameter.

    The model runs in evaluation mode, without gradients, and is restored afterwards. The documents beside the file
    are not trusted; their claims are checked.

    Args:
        modules: Selectors of the calls to compare, with those inside them; by default all.
        provider: The execution provider of ONNX Runtime.
        sidecar: ``NAME.hierarchy.json``; by default the document beside the file.
        weights: The places of the weights of a model that was built without them; each module gets its own as it runs.
        perturb: Change the weights in memory, on both sides, so that no two are equal; by default if some are.
        others: Also compare outputs on padded masks, other ids and numbers, and other sizes of dynamic axes.
        kept: Runs of the model on these inputs, reused and added to, if several files of it are verified.
        tell: Called with the name of each step.

    Raises:
        FileFormatError: The file has no tags, or its weights files have changed.
        InputsError: The inputs do not fit the file.
        UsageError: The model is not the one that was exported, or a module or provider does not exist.
    """
    with only_new_garbage(), state_remembered(model):
        return _verify(model, inputs, path, modules, provider, sidecar, weights, perturb, others, kept, tell)


def _verify(
    model: nn.Module,
    inputs: Inputs,
    path: str | Path,
    modules: Sequence[str],
    provider: str,
    sidecar: documents.Hierarchy | None,
    weights: Weights | None,
    perturb: bool | None,
    others: bool,
    kept: KeptRuns | None,
    tell: Tell,
) -> VerifyReport:
    tagged = _open(model, path)
    constants = _constants(sidecar or tagged.hierarchy)
    inputs = prepare_inputs(model, inputs, [one for one in constants if one in arguments_by_name(model, inputs)]).inputs
    chosen = tagged.select(*modules).calls if modules else ()
    runs = ModelRuns(model, tagged, weights, kept or KeptRuns())
    whole = compare_whole(runs, inputs, constants, perturb=perturb, others=others, provider=provider, tell=tell)
    parameters = _parameters(model, tagged.model, weights, keep=True)
    if whole.perturbed:
        put_in(tagged.model, as_arrays(model, whole.perturbed, as_array).__getitem__, whole.perturbed)
    tell("verify: every call")
    proof = prove_calls(tagged, whole.given, whole.run, provider=provider, modules=chosen)
    proof.wrong_weights = _wrong_weights(tagged, parameters)
    calls = verdicts_of(proof, chosen)
    repeatable = _repeatable(runs, inputs, whole, calls, tell)
    if draws_numbers(runs.tagged.model) and runs.weights is None:
        whole = _without_random_outputs(runs, whole)
    if repeatable is not None:
        whole = repeatable.without_outputs(whole)
        proof = prove_calls(tagged, whole.given, repeatable, provider=provider, modules=chosen)
        proof.wrong_weights = _wrong_weights(tagged, parameters)
        calls = repeatable.explained(verdicts_of(proof, chosen))
    if repeatable is None and not any(call.status == "differ" for call in calls):
        calls = with_own_weights(calls, proof, inputs, whole, runs, chosen, tell)
    if not any(call.status == "differ" for call in calls):
        calls = on_other_inputs(calls, proof, whole, runs, chosen, tell)
    if runs.weights is None and not any(call.status == "differ" for call in calls):
        calls = with_idle_nodes(calls, proof, inputs, whole, runs, tell)
    claims = false_claims(tagged, sidecar, whole.run, proof.values, module_tree(model), entries=entries_of(model))
    return VerifyReport(
        outputs=whole.outputs,
        calls=calls,
        provider=provider,
        units=dict(UNITS),
        parameters=parameters,
        claims=[*claims, *(one for one in whole.others.claims if one.where not in {claim.where for claim in claims})],
        others=whole.others.compared,
        perturbed=bool(whole.perturbed),
        optimizer=whole.optimizer,
        notes=whole.notes,
    )


def _repeatable(
    runs: ModelRuns, inputs: Inputs, whole: WholeComparison, calls: Sequence[CallVerdict], tell: Tell
) -> Repeatable | None:
    """The run without what depends on random numbers, if there is such."""
    statuses = {o.status for o in whole.outputs} | {c.status for c in calls} | {o.status for o in whole.others.compared}
    if runs.weights is not None or not ("differ" in statuses or draws_numbers(runs.tagged.model)):
        return None
    tell("verify: random numbers")
    return without_random(whole.run, runs.with_other_numbers(inputs, whole.perturbed), runs.tagged.model)


def _without_random_outputs(runs: ModelRuns, whole: WholeComparison) -> WholeComparison:
    """Random numbers may reach an output on other inputs only."""
    compared = []
    for one in whole.others.compared:
        if one.status == "differ" and one.outputs:
            other = whole.others.inputs[one.what]
            again = [run.outputs for run in runs.with_other_numbers(other, {})]
            compared.append(without(one, random_outputs(runs.outputs(other), again, runs.tagged.model)))
        else:
            compared.append(one)
    return replace(whole, others=replace(whole.others, compared=compared))


def _constants(sidecar: documents.Hierarchy | None) -> tuple[str, ...]:
    """The arguments of ``forward`` whose values the file keeps."""
    return () if sidecar is None else tuple(sidecar.settings.constants)


def _open(model: nn.Module, path: str | Path) -> TaggedFile:
    tagged = read_tagged(Path(path))
    entries = {k: (str(t.dtype).removeprefix("torch."), list(t.shape)) for k, t in entries_of(model).items()}
    check_same_entries(entries, tagged.model, tagged.path)
    check_files(tagged.model)
    return tagged


def _wrong_weights(tagged: TaggedFile, parameters: ParameterReport) -> dict[ModuleCall, str]:
    users = users_of(tagged.model, set(parameters.differing))
    return {call: f"its weights differ from the model's: {', '.join(dict.fromkeys(v))}" for call, v in users.items()}


@exclusive
def verify_sample(
    model: nn.Module,
    inputs: Inputs,
    path: str | Path,
    *,
    count: int = 0,
    modules: Sequence[str] = (),
    provider: str = CPU,
    seed: int = 0,
    weights: Weights | None = None,
) -> VerifyReport:
    """Compare only some calls, each cut out of the file and run alone: for a file that is too large to run whole.

    PyTorch first runs all modules from the inputs, for the values that enter and leave the calls. With ``weights`` it
    holds those of one module at a time, so that memory does not grow with the model. The sidecar maps values to
    tensors; a wrong entry shows as a difference.

    Args:
        count: The number of calls to draw from those that own nodes.
        modules: Selectors of further calls to compare, with those inside them.
        seed: The seed of the draw.
        weights: As in :func:`verify`.

    Returns:
        A report without outputs, with the compared calls and the parameters that they use.

    Raises:
        FileFormatError, InputsError, UsageError: As :func:`verify`; or the file has no sidecar.
    """
    tagged = _open(model, path)
    calls = set(tagged.select(*modules).inside) if modules else set()
    calls.update(sampled_calls(tagged, count, seed=seed))
    names = [value.name or "" for value in required_inputs(tagged.model)]
    verdicts: list[CallVerdict] = []
    needed: set[str] = set()
    if calls:
        run = run_observed(model, inputs, tagged, weights, {})
        verdicts, needed = verify_alone(tagged, under_names(inputs, names), run, calls, provider=provider)
    return VerifyReport(
        outputs=[],
        calls=verdicts,
        provider=provider,
        units=dict(UNITS),
        parameters=_parameters(model, tagged.model, weights, needed),
        notes=[] if calls else ["no call was chosen: give a number above 0 with --weights-sample, or --module"],
    )


@exclusive
def record_reference(
    model: nn.Module,
    inputs: Inputs,
    path: str | Path,
    *,
    modules: Sequence[str] = (),
    sidecar: documents.Hierarchy | None = None,
    announce: Callable[[int], None] = lambda size: None,
    weights: Weights | None = None,
) -> Path:
    """Run a model and store its inputs, its outputs and the boundary values of its calls beside its file.

    Args:
        path: A tagged file of the model; ``NAME.reference.safetensors`` is written beside it.
        modules: Selectors of the calls whose values to store, with those inside them; by default all.
        sidecar: ``NAME.hierarchy.json``; by default the document beside the file.
        announce: Called with the size in bytes before anything is written.
        weights: The places of the weights of a model that was built without them.

    Returns:
        The file that was written.

    Raises:
        FileFormatError: The file has no tags.
        InputsError: The inputs do not fit the file.
        OutputError: There is not enough space for them.
        UsageError: A module does not exist.
    """
    tagged = read_tagged(path)
    chosen = tagged.select(*modules).calls if modules else ()
    run = run_observed(model, inputs, tagged, weights, {})
    target = reference_path(tagged.path)
    write_reference(
        target,
        tagged,
        run,
        inputs=under_names(inputs, [value.name or "" for value in required_inputs(tagged.model)]),
        weights=parameter_digests(tagged.model),
        modules=chosen,
        sidecar=sidecar or tagged.hierarchy,
        announce=announce,
    )
    return target


def verify_parameters(model: nn.Module, path: str | Path) -> ParameterReport:
    """Compare each parameter in a tagged file with the model's ``state_dict``, bit for bit.

    Raises:
        FileFormatError: It is not a tagged file.
    """
    return _parameters(model, read_tagged(path).model)


def _parameters(
    model: nn.Module,
    file: ir.Model,
    weights: Weights | None = None,
    only: set[str] | None = None,
    *,
    keep: bool = False,
) -> ParameterReport:
    tensors, apart = entries_of(model), weights.tensors if weights is not None else {}

    def read(key: str) -> Any:
        return apart[key].numpy() if key in apart else as_array(as_stored(tensors[key]))

    def is_same_place(key: str, tensor: ir.TensorProtocol) -> bool:
        return key in apart and _same_place(apart[key], tensor)

    report = compare_parameters(file, tensors.keys(), read, is_same_place=is_same_place, only=only, keep=keep)
    if weights is not None or only is not None:
        return report
    unsaved = {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name not in tensors}
    wrong = differing_buffers(file, lambda name: as_array(unsaved[name]), unsaved)
    return msgspec.structs.replace(report, differing=[*report.differing, *wrong])


def _same_place(one: ir.TensorProtocol, other: ir.TensorProtocol) -> bool:
    """Whether two tensors are the same bytes of one file, and so are known to be equal without reading them."""
    if not isinstance(one, ir.ExternalTensor) or not isinstance(other, ir.ExternalTensor):
        return False
    facts = [(t.offset, t.length, t.dtype, tuple(t.shape.numpy())) for t in (one, other)]
    return facts[0] == facts[1] and Path(one.path).samefile(other.path)

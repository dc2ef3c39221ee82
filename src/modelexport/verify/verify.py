"""Compares a file with its model: the page to read.

Both run in float64 from the same numbers, so that a sound file agrees with PyTorch at every call to 1e-9 of a value's
size, in whatever order it computes (:mod:`modelexport.traces`). What is compared:

1. parameters, bit for bit (:mod:`.parameter_comparison`);
2. every tensor that a module returns, looked up among the values of the file (:mod:`.matched_values`); only
   behind a difference is the file cut, to find the call that makes it (:mod:`.wrong_calls`);
3. the owner of each node (:mod:`.owner_contradictions`);
4. the outputs as ONNX Runtime computes them for users (:mod:`.onnxruntime_outputs`);
5. the outputs on other inputs (:mod:`.other_inputs`);
6. what documents claim (:mod:`.document_claims`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from torch import nn

from modelexport.core.calls import ModuleCall
from modelexport.core.garbage_collection import only_new_garbage
from modelexport.core.one_at_a_time import exclusive
from modelexport.errors import UsageError
from modelexport.files.path_or_model import Source, as_path
from modelexport.format import documents
from modelexport.pytorch.calls.module_tree_of_model import module_tree
from modelexport.pytorch.inputs.generated_inputs import check_inputs
from modelexport.pytorch.inputs.inputs_that_fit import check_inputs_fit
from modelexport.pytorch.inputs.prepared_inputs import arguments_by_name, kept_tensors, prepare_inputs
from modelexport.pytorch.nested_tensors import Inputs
from modelexport.pytorch.perturbed_weights import entries_of
from modelexport.runtime.devices import CPU
from modelexport.runtime.saturating_products import saturation_notes
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.traces.reference_values import reference_path, write_reference
from modelexport.verify.calls_by_value import wrong_parameters
from modelexport.verify.compared_runs import Compared, explained, output_differences
from modelexport.verify.document_claims import false_claims
from modelexport.verify.model_and_file import ModelAndFile, ModelRuns, open_for
from modelexport.verify.onnxruntime_outputs import AsRun
from modelexport.verify.other_inputs import Others, compare_others
from modelexport.verify.parameter_comparison import parameter_digests, users_of, with_verdicts_of_weights
from modelexport.verify.parameters_in_pytorch import changed_weights, compare_with_model
from modelexport.verify.verdicts import verdicts_of
from modelexport.verify.verify_report import CallVerdict, VerifyReport
from modelexport.weights.bytes_of_entries import Weights


@exclusive
def verify(
    model: nn.Module,
    inputs: Inputs,
    path: Source | TaggedFile,
    *,
    modules: Sequence[str] = (),
    provider: str = CPU,
    sidecar: documents.Hierarchy | None = None,
    weights: Weights | None = None,
    perturb: bool | None = None,
    others: bool = True,
    runs: ModelRuns | None = None,
    progress: Callable[[str], None] | None = None,
) -> VerifyReport:
    """Compare every output, every call and every parameter of a file with its model.

    The model runs in evaluation mode, without gradients, and is restored afterwards. The documents beside the file
    are not trusted; their claims are checked.

    Args:
        modules: Selectors of the calls to compare, with those inside them; by default all.
        provider: The execution provider of ONNX Runtime for the outputs.
        sidecar: ``NAME.hierarchy.json``; by default the document beside the file.
        weights: The places of the weights of a model that was built without them; each module gets its own as it runs.
        perturb: Change the weights in memory, on both sides, so that no two are equal; by default if some are.
        others: Also compare outputs on padded masks, other ids and numbers, and other sizes of dynamic axes.
        runs: Those of the model, if several files of it are verified.
        progress: Called with the name of each step.

    Raises:
        FileFormatError: It is not an ONNX file, or its weights files have changed.
        InputsError: The inputs do not fit the file.
        UsageError: The model is not the one that was exported, or a module or provider does not exist.
    """
    tell = progress or (lambda step: None)
    if not isinstance(path, TaggedFile) and as_path(path).is_dir():
        raise UsageError(f"{path} is a folder: give verify_package(model, inputs, folder)")
    with only_new_garbage():
        tagged = open_for(model, path)
        known_sidecar = sidecar or tagged.hierarchy  # what is used of it, if it was written with the file
        constants = tuple(known_sidecar.settings.constants) if known_sidecar is not None else ()
        arguments = arguments_by_name(model, inputs)
        inputs = prepare_inputs(model, inputs, [name for name in constants if name in arguments]).inputs
        pair = ModelAndFile.of(runs or ModelRuns(model, weights), inputs, tagged)
        if tagged.by_value:
            perturb = perturb or False  # entries that were folded into others cannot be changed in the file
        changed, notes = changed_weights(model, tagged.model, perturb) if weights is None else ({}, [])
        parameters = compare_with_model(model, tagged.model, weights)
        if weights is None:
            try:
                check_inputs_fit(pair.feeds(inputs), tagged)
                if not changed:
                    pair.trace(inputs, {})  # first, so that no other run is needed to settle
                pair = pair.settled(inputs)
            except Exception:
                check_inputs(model, inputs)  # if the model does not run with them, it says so
                raise
        tell("verify: every call")
        if tagged.by_value:
            pair = pair.with_calls_by_value(inputs, changed)
            tagged = pair.tagged
        chosen = tagged.select(*modules).calls if modules else (tagged.top,)
        pair, compared = pair.compared(inputs, changed)
        run = AsRun([])
        if weights is None:
            tell("verify: the outputs in ONNX Runtime")
            run = pair.as_run(inputs, provider, pair.returned(inputs))
            run = explained(run, compared, other_weights=bool(parameters.differing))
            notes += pair.runs.note_on_fused(inputs)
        varied = Others()
        if others and weights is None and compared.agrees and tagged.cut is None:
            tell("verify: other inputs")
            selects = known_sidecar is not None and bool(known_sidecar.settings.presumed)
            varied = compare_others(pair, inputs, kept_tensors(model, inputs, constants), selects=selects)
        if tagged.by_value:
            wrong = wrong_parameters(tagged.model, entries_of(model), compared.located.blamed)
            parameters = msgspec.structs.replace(parameters, differing=[*parameters.differing, *wrong])
        calls = verdicts_of(compared, chosen)
        if compared.agrees and varied.wrong is not None:
            calls = _with_others(calls, varied.wrong, chosen)
        claims = []
        if not tagged.by_value:
            claims = false_claims(
                tagged, known_sidecar, compared.end_to_end, module_tree(model), entries=entries_of(model)
            )
        return VerifyReport(
            outputs=run.outputs or output_differences(compared),
            calls=with_verdicts_of_weights(calls, users_of(tagged.nodes, set(parameters.differing)), "the model's"),
            provider=provider,
            parameters=parameters,
            owners=compared.owners,
            claims=claims,
            others=varied.compared,
            perturbed=bool(changed),
            selected=bool(modules),
            cause=run.cause,
            notes=[*pair.notes, *notes, *run.notes, *saturation_notes(tagged.nodes, tagged.path)],
        )


def _with_others(calls: Sequence[CallVerdict], wrong: Compared, chosen: Sequence[ModuleCall]) -> list[CallVerdict]:
    """Verdicts with the calls that differ on other inputs."""
    differing = {call.address: call for call in verdicts_of(wrong, chosen) if call.status == "differ"}
    return [differing.get(call.address, call) for call in calls]


@exclusive
def record_reference(
    model: nn.Module,
    inputs: Inputs,
    path: Source,
    *,
    modules: Sequence[str] = (),
    sidecar: documents.Hierarchy | None = None,
    announce: Callable[[int], None] = lambda size: None,
    weights: Weights | None = None,
    runs: ModelRuns | None = None,
) -> Path:
    """Run a model and store its inputs, its outputs and the boundary values of its calls beside its file.

    Args:
        path: A tagged file of the model; ``NAME.reference.safetensors`` is written beside it.
        modules: Selectors of the calls whose values to store, with those inside them; by default all.
        sidecar: ``NAME.hierarchy.json``; by default the document beside the file.
        announce: Called with the size in bytes before anything is written.
        weights: The places of the weights of a model that was built without them.
        runs: Those of the model, if it ran before.

    Returns:
        The file that was written.

    Raises:
        FileFormatError: The file is missing or damaged.
        InputsError: The inputs do not fit the file.
        OutputError: There is not enough space for them.
        UsageError: A module does not exist.
    """
    tagged = read_tagged(path)
    chosen = tagged.select(*modules).calls if modules else ()
    pair = ModelAndFile.of(runs or ModelRuns(model, weights), inputs, tagged)
    trace = pair.trace(inputs, {})
    target = reference_path(tagged.path)
    write_reference(
        target,
        tagged,
        trace,
        dtype=pair.dtype,
        inputs=pair.feeds(inputs),
        outputs=pair.runs.own(inputs) if weights is None else trace.outputs,
        weights=parameter_digests(tagged.model),
        modules=chosen,
        sidecar=sidecar or tagged.hierarchy,
        announce=announce,
    )
    return target

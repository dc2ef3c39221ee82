"""Compares a file with the reference values beside it; does not need PyTorch."""

from __future__ import annotations

import json
from collections.abc import Sequence

from modelexport.errors import FileFormatError, UsageError
from modelexport.files.path_or_model import Source
from modelexport.graph.kept_outputs import exposed_outputs
from modelexport.graph.parameter_plans import parameter_plans
from modelexport.runtime.devices import CPU
from modelexport.runtime.saturating_products import saturation_notes
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.traces.file_run import FileRun
from modelexport.traces.reference_values import ReferenceValues, open_reference, reference_path
from modelexport.verify.compared_runs import compare_runs, explained
from modelexport.verify.cut_out_calls import refuse_stage
from modelexport.verify.document_claims import false_claims
from modelexport.verify.onnxruntime_outputs import compare_as_run
from modelexport.verify.parameter_comparison import Users, parameter_digests, users_of, with_verdicts_of_weights
from modelexport.verify.verdicts import verdicts_of
from modelexport.verify.verify_report import VerifyReport


def verify_reference(path: Source, *, modules: Sequence[str] = (), provider: str = CPU) -> VerifyReport:
    """Compare every output and every call of a file with the values of the PyTorch run beside it, without torch.

    Args:
        path: A tagged file with ``NAME.reference.safetensors`` beside it.
        modules: Selectors of the calls to compare, with those inside them; by default all whose values are stored.
        provider: The execution provider of ONNX Runtime for the outputs.

    Raises:
        FileFormatError: The file has no reference values, or they were made with other weights.
        UsageError: A module or provider does not exist, or the values of a module are not stored.
    """
    tagged = read_tagged(path)
    refuse_stage(tagged.path, "the file that was split")
    chosen = tagged.select(*modules).calls if modules else ()
    if tagged.cut is not None and not reference_path(tagged.path).is_file():
        raise UsageError(
            f"{tagged.path} is the call '{tagged.cut.call}' of {tagged.cut.file}: compare the two "
            "(compare FILE WHOLE --numbers), or give the model with --model"
        )
    with open_reference(tagged) as reference:
        for call in chosen:
            if reference.modules and set(reference.modules).isdisjoint(tagged.calls.stack(call)):
                kept = ", ".join(map(str, reference.modules))
                raise UsageError(f"{reference_path(tagged.path)} has no values of {call}: it has those of {kept}")
        wrong = _wrong_weights(tagged, reference)
        run = compare_as_run(
            tagged,
            reference.inputs,
            reference.outputs,
            reference.outputs,
            provider=provider,
            exposed=exposed_outputs(tagged.model),
        )
        compared = compare_runs(
            tagged, FileRun(tagged.model, in_float64_for=reference.dtype), reference.inputs, reference.trace, {}
        )
        run = explained(run, compared)
        return VerifyReport(
            outputs=run.outputs,
            calls=with_verdicts_of_weights(
                verdicts_of(compared, chosen or reference.modules), wrong, "the stored run's"
            ),
            provider=provider,
            parameters=None,
            owners=compared.owners,
            claims=false_claims(tagged, None, compared.end_to_end, None),
            cause=run.cause,
            notes=[*run.notes, *saturation_notes(tagged.nodes, tagged.path)],
        )


def _wrong_weights(tagged: TaggedFile, reference: ReferenceValues) -> Users:
    """The calls whose weights differ from those that the values were computed with."""
    here = parameter_digests(tagged.model)
    known = [entry for entry in here if entry in reference.weights]
    other = [entry for entry in known if here[entry] != reference.weights[entry]]
    if len(other) > len(known) / 2:
        path = reference_path(tagged.path)
        raise FileFormatError(
            f"{path} was made with other weights than {tagged.path} has ({len(other)} of {len(known)} parameters "
            "differ): remove it, or export with --reference again"
        )
    plans = parameter_plans(tagged.model).items()
    names = {value.name or "" for value, plan in plans if json.dumps([plan.keys, len(plan.steps)]) in other}
    return users_of(tagged.nodes, names)

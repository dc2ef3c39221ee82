"""The outputs of a file that was just written against PyTorch's, as users run both, and with rows of masks hidden."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from modelexport.core.text import first_few, plural
from modelexport.errors import UsageError
from modelexport.format.dtypes import dtype_name
from modelexport.graph.kept_outputs import exposed_outputs, requested_outputs
from modelexport.graph.nodes import initializers
from modelexport.traces.array_differences import relative_error
from modelexport.traces.tolerances import CLEARLY_WRONG

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

    from modelexport.pytorch.nested_tensors import Inputs
    from modelexport.traces.trace import Trace
    from modelexport.verify.compared_runs import Compared
    from modelexport.verify.model_and_file import ModelAndFile

CheckStep = Literal["onnx.checker", "loading", "running", "outputs", "other inputs", "other sizes"]


class FileCheck(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of checking a file."""

    status: Literal["passed", "failed", "skipped"]
    step: CheckStep | None = None
    """The step that failed or could not be done, or in which a difference was explained."""
    reason: str = ""
    largest: float | None = None
    """The largest error of any output: the norm of the difference over the norm of the output."""
    cause: str = ""
    """The part of ONNX Runtime that makes the outputs wrong, if the file itself is right."""


def check_outputs(pair: ModelAndFile, inputs: Inputs, path: Path) -> FileCheck:
    """Compare what a file computes in ONNX Runtime with what the model returns; float64 tells a fault from rounding.

    Args:
        pair: The model and the file at ``path``.
        inputs: The example inputs; not changed.
    """
    from modelexport.pytorch.runs.repeatability import find_unrepeatable
    from modelexport.runtime.devices import CPU
    from modelexport.runtime.sessions import open_session, run_session
    from modelexport.traces.outputs_of_two_files import RANDOM
    from modelexport.verify.compared_runs import explained
    from modelexport.verify.onnxruntime_outputs import nan_note
    from modelexport.verify.parameters_in_pytorch import changed_weights

    from_torch = pair.runs.own(inputs)
    step: CheckStep = "loading"
    try:
        runs = open_session(path, optimized=True)
        step = "running"
        results = run_session(runs, pair.feeds(inputs))
    except UsageError as error:
        return _not_run(pair, step, str(error))
    in_file, otherwise = pair.tagged.model, _declared_otherwise(runs, results)
    returned, outputs = requested_outputs(in_file, from_torch), len(runs.get_outputs()) - len(exposed_outputs(in_file))
    masked = _wrong_without_keys(pair, inputs, runs)
    del runs  # its weights, and the copies of them that its kernels prefer
    if len(returned) != outputs:
        reason = f"PyTorch returns {len(returned)} tensors, the file {outputs}"
        return FileCheck(status="failed", step="outputs", reason=reason)
    pair.trace(inputs, {})  # first, so that no other run is needed to settle
    pair = pair.settled(inputs)
    reference = pair.trace(inputs, {})
    run = pair.as_run(inputs, CPU, reference.outputs, results)
    pair, compared = pair.compared(inputs, {})
    run = explained(run, compared)
    compared_outputs = [output for output in run.outputs if output.status != "not compared"]
    largest = max((output.relative or 0.0 for output in compared_outputs), default=None)
    if wrong := [output for output in run.outputs if output.status == "differ"]:
        reason = f"{wrong[0].name} differs from PyTorch's output: {wrong[0].reason}"
        if run.cause:
            reason += f"; the file is right, but {run.cause} makes its outputs wrong"
        return FileCheck(status="failed", step="outputs", reason=reason, largest=largest, cause=run.cause)
    random = compared.end_to_end.trace.random or reference.random_numbers
    if masked and not random:
        return FileCheck(status="failed", step="other inputs", reason=masked)
    excused = [output.reason for output in run.outputs if output.status != "agree"]
    if RANDOM in excused:
        behaviors = find_unrepeatable(pair.model, inputs)
        repeats = not any(behavior.kind in ("random", "state", "buffer") for behavior in behaviors)
        reason = _SAME_NUMBERS if repeats else RANDOM
        return FileCheck(status="failed" if repeats else "skipped", step="outputs", reason=reason)
    doubted = compared
    if compared.contradictions and (changed := changed_weights(pair.model, pair.tagged.model, None)[0]):
        _, doubted = pair.compared(inputs, changed)  # by fresh weights, several calls may compute one value
    doubts = filter(
        None,
        (*excused[:1], nan_note(run.outputs, returned), otherwise, _lost_calls(pair, reference), _doubts(doubted)),
    )
    return FileCheck(status="passed", step="outputs" if excused else None, reason="; ".join(doubts), largest=largest)


_SAME_NUMBERS = "the file draws random numbers, and PyTorch has the same in every run: make them a buffer of the model"


def _not_run(pair: ModelAndFile, step: CheckStep, error: str) -> FileCheck:
    """The check of a file that ONNX Runtime does not run: skipped if it has types that other providers may run."""
    from modelexport.runtime.sessions import NO_BFLOAT16, NO_KERNEL

    values = [*initializers(pair.tagged.model), *(value for node in pair.tagged.nodes for value in node.outputs)]
    types = {dtype_name(value.dtype) for value in values if value.dtype is not None}.intersection(_FEW_KERNELS)
    reason = error[:LONGEST_REASON]
    if not types or not any(message in error for message in (NO_KERNEL, NO_BFLOAT16)):
        return FileCheck(status="failed", step=step, reason=reason)
    reason += (
        f"; other providers may run {', '.join(sorted(types))}, and a model in float32 (--dtype float32, "
        f"model.float()) runs on all"
    )
    return FileCheck(status="skipped", step=step, reason=reason)


def _wrong_without_keys(pair: ModelAndFile, inputs: Inputs, runs: InferenceSession) -> str:
    """What is wrong where masks leave no key to a query and PyTorch has finite numbers; empty if nothing.

    ONNX Runtime's run, which is quick, is compared first; float64 decides. What the file keeps is not changed.
    """
    from modelexport.pytorch.inputs.other_sizes import inputs_of_file
    from modelexport.pytorch.inputs.variations import with_hidden_rows
    from modelexport.pytorch.nested_tensors import tensors_in
    from modelexport.pytorch.runs.outputs_as_users_run import returned_by
    from modelexport.runtime.sessions import run_session

    model = pair.tagged.model
    taken = inputs_of_file(inputs, model)
    kept = [name for name, _ in tensors_in(inputs) if name not in taken]
    for what, other in with_hidden_rows(inputs, kept):
        try:
            right = requested_outputs(model, returned_by(pair.model, other))
            outputs = [
                array
                for name, array in run_session(runs, pair.feeds(other)).items()
                if name not in exposed_outputs(model)
            ]
            if not all(np.isfinite(array_of_torch.astype(np.float64)).all() for array_of_torch in right):
                continue
            apart = max((relative_error(*both) for both in zip(right, outputs, strict=False)), default=0.0)
            if apart <= CLEARLY_WRONG or pair.agrees(other, pair.returned(other)):
                continue
            if not pair.compared(other, {})[1].agrees:  # constants of the file may be rounded
                return f"with {what}: the file is off by {apart:.1e} of PyTorch's size, or not finite"
        except Exception:  # of the model, which may not accept them
            continue
    return ""


_FEW_KERNELS = ("float16", "bfloat16", "float64")
"""Types of values for which ONNX Runtime implements many operators on other devices only."""


def _declared_otherwise(runs: InferenceSession, results: Mapping[str, Any]) -> str:
    """The first output whose sizes are not those that the file declares; empty if there is none."""
    for output in runs.get_outputs():
        shape = list(getattr(results[output.name], "shape", ()))
        fixed = [size if isinstance(size, int) else actual for size, actual in zip(output.shape, shape, strict=False)]
        if shape and output.shape and (len(shape) != len(output.shape) or fixed != shape):
            return f"the file declares {output.name} as {output.shape}, and it is {shape}"
    return ""


def _lost_calls(pair: ModelAndFile, reference: Trace) -> str:
    """The calls that PyTorch makes and the export did not; empty if there are none."""
    lost = [call for call, parent in reference.parents.items() if call not in pair.tagged.calls and parent is not None]
    if not lost:
        return ""
    return (
        f"the file lacks {plural(len(lost), 'call')} that PyTorch makes ({first_few(map(str, lost), 3)}): the model "
        "runs other code while it is exported"
    )


def _doubts(compared: Compared) -> str:
    """The owners of nodes in the file that a run contradicts; empty if there are none."""
    if not compared.contradictions:
        return ""
    first = compared.contradictions[0]
    count = plural(len(compared.contradictions), "node")
    return f"{count} may be of another call; the first is {first.node.name}, given to {first.call}: {first.reason}"


LONGEST_REASON = 300
"""The largest number of characters of a reason in a message."""

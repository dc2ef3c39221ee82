"""The choice of the front end: the one asked for or, with ``auto``, the first whose file passes its check."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from modelexport.capture import FrontEnd, dynamo, torchscript
from modelexport.capture.exported_graph import Exported
from modelexport.capture.fixed_answers import fixed_answers
from modelexport.capture.patches import warn_once
from modelexport.capture.presumed_selections import DECISIONS, Presumed
from modelexport.capture.repairs.resizing import copy_along_equal_sizes, give_sizes_of_pytorch, pick_pixels_as_pytorch
from modelexport.capture.script_modules import scripts_converted
from modelexport.capture.value_decisions import DecisionError, inputs_read
from modelexport.core.collected_messages import collected
from modelexport.core.text import chained, text_without_paths
from modelexport.errors import CaptureError, CheckError, UntaggedNodeError, UsageError
from modelexport.graph.narrow_to_float32 import compute_in_float32
from modelexport.pytorch.calls.traced_tree import has_narrow_weights
from modelexport.pytorch.inputs.other_sizes import fix_broadcast_axes
from modelexport.pytorch.inputs.prepared_inputs import AUTO, prepare_inputs
from modelexport.pytorch.nested_tensors import Inputs
from modelexport.pytorch.runs.questions_of_values import most_times_asked
from modelexport.runtime.wider_integers import compute_in_wider_integers

_T = TypeVar("_T")

FRONT_ENDS: Mapping[str, Callable[..., Exported]] = {
    "dynamo": dynamo.capture_by_dynamo,
    "torchscript": torchscript.capture_by_tracing,
}
WAYS: Sequence[FrontEnd] = ("dynamo", "torchscript")
"""The front ends that ``auto`` tries, in order."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A front end that was tried, and why its file was rejected."""

    frontend: str
    reason: str
    asks_for_values: bool = False
    """Python decides by values: the file of another front end is to be compared on other inputs."""


def first_that_passes(
    frontend: FrontEnd, export_by: Callable[[FrontEnd, Sequence[Attempt], bool], _T], *, keep_anyway: bool = False
) -> _T:
    """The result of the first front end that captures the model and whose file passes its check.

    Args:
        frontend: ``auto`` tries all of them in turn.
        export_by: Exports with a front end, given the earlier attempts and whether to accept a failed check.
        keep_anyway: If no file passes, take the first file.

    Raises:
        CaptureError: No front end can capture the model.
        CheckError: No file passes.
        UntaggedNodeError: In every graph a node has no owner.
    """
    if frontend != "auto":
        return export_by(frontend, (), keep_anyway)
    tried: list[Attempt] = []
    errors: list[CaptureError | CheckError | UntaggedNodeError | UsageError] = []
    for way in WAYS:
        try:
            return export_by(way, tuple(tried), False)
        except (CaptureError, CheckError, UntaggedNodeError) as error:
            errors.append(error)
        except UsageError as error:
            if not errors:
                raise
            errors.append(error)
        tried.append(Attempt(way, _reason(errors[-1]), _asks_for_values(errors[-1])))
    failed = [way for way, error in zip(WAYS, errors, strict=True) if isinstance(error, CheckError)]
    if keep_anyway and failed:
        return export_by(failed[0], tuple(attempt for attempt in tried if attempt.frontend != failed[0]), True)
    raise _none_passes(errors)


def _none_passes(errors: Sequence[Exception]) -> Exception:
    """One error for all attempts: the first, preferably of one that wrote a file, with the reasons of the others."""
    first = next((error for error in errors if isinstance(error, CheckError)), errors[0])
    others = ""
    for way, error in zip(WAYS, errors, strict=True):
        if error is not first:
            same = _reason(error) == _reason(first)
            others += f"; the front end {way} failed {'for the same reason' if same else f'too: {_reason(error)}'}"
    if isinstance(first, CaptureError):
        combined: Exception = CaptureError(
            f"{first.problem}{others}",
            address=first.address,
            reason=first.reason,
            constants=next((e.constants for e in errors if isinstance(e, CaptureError) and e.constants), ()),
        )
    elif isinstance(first, CheckError):
        runs = first.exit_status == CheckError.exit_status
        combined = CheckError(f"{first}{others}", reason=first.reason, runs=runs)
    else:
        return first
    combined.__cause__ = first
    return combined


def capture(
    model: nn.Module, inputs: Inputs, frontend: str, *, constants: Collection[str] = (), **options: Any
) -> Exported:
    """Capture and translate a model with a front end.

    Args:
        constants: Arguments whose values the graph keeps; ``auto``: those that it cannot be captured without.
        options: ``dynamic``, ``ones``, ``opset`` and ``stack_traces``, as the front ends take them.

    Raises:
        CaptureError: The front end failed.
        InputsError: The inputs do not fit.
        UsageError: The front end does not write this opset.
    """
    warn_once()
    with collected() as messages:
        exported = _capture_by(frontend, model, inputs, constants=constants, **options)
    return dataclasses.replace(exported, messages=tuple(messages))


def _capture_by(
    frontend: str, model: nn.Module, inputs: Inputs, *, constants: Collection[str], **options: Any
) -> Exported:
    """Capture with one front end. Where the model decides by the values of inputs, offer those or take them."""
    named = [name for name in constants if name != AUTO]
    try:
        return _capture_with(frontend, model, inputs, named, **options)
    except CaptureError as error:
        offered = [name for name in inputs_read(model, inputs) if name not in named]
        if not offered:
            raise
        failure = error
    if AUTO in constants:
        return _capture_by(frontend, model, inputs, constants=[*named, *offered], **options)
    with contextlib.suppress(UsageError):  # what does not help is not offered
        _capture_with(frontend, model, inputs, [*named, *offered], **options)
        failure = CaptureError(failure.problem, address=failure.address, reason=failure.reason, constants=offered)
    raise failure from failure.__cause__


def _capture_with(frontend: str, model: nn.Module, inputs: Inputs, constants: list[str], **options: Any) -> Exported:
    with scripts_converted(model, inputs) as captured:
        exported = _captured(FRONT_ENDS[frontend], captured, inputs, constants=constants, **options)
    if not has_narrow_weights(model):
        compute_in_float32(exported.model)
    compute_in_wider_integers(exported.model)
    copy_along_equal_sizes(exported.model)
    pick_pixels_as_pytorch(exported.model)
    give_sizes_of_pytorch(exported.model)
    prepared = prepare_inputs(model, inputs, constants)
    fix_broadcast_axes(exported.model, prepared.inputs)
    return dataclasses.replace(exported, constants=prepared.constants)


def _asks_for_values(error: BaseException) -> bool:
    return any(isinstance(cause, (*DECISIONS, DecisionError)) for cause in chained(error))


def _captured(front_end: Callable[..., Exported], model: nn.Module, inputs: Inputs, **options: Any) -> Exported:
    """Capture a model; once more, with its questions answered, if Python asks of values."""
    try:
        return front_end(model, inputs, **options)
    except CaptureError as error:
        if not _asks_for_values(error):
            raise
        failure = error
    fixed = fixed_answers(model, inputs, options["constants"], dynamic=options.get("dynamic", False))
    most = most_times_asked(model, inputs)
    with contextlib.suppress(CaptureError):
        exported = front_end(model, inputs, presumed=Presumed(fixed, most), **options)
        return dataclasses.replace(exported, answered=True)
    raise failure from failure.__cause__


def _reason(error: Exception) -> str:
    return text_without_paths(error.problem if isinstance(error, CaptureError) else str(error))

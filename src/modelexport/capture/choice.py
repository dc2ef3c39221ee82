"""The choice of the front end: the one asked for or, with ``auto``, the first whose file passes its check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from modelexport.capture import FrontEnd, dynamo, torchscript
from modelexport.capture.exported import Exported
from modelexport.core.messages import collected
from modelexport.errors import CaptureError, CheckError, UntaggedNodeError, UsageError

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
        tried.append(Attempt(way, _reason(errors[-1])))
    failed = [way for way, error in zip(WAYS, errors, strict=True) if isinstance(error, CheckError)]
    if keep_anyway and failed:
        return export_by(failed[0], tuple(attempt for attempt in tried if attempt.frontend != failed[0]), True)
    raise _none_passes(errors)


def _none_passes(errors: Sequence[Exception]) -> Exception:
    """One error for all attempts: the first, preferably of one that wrote a file, with the reasons of the others."""
    first = next((error for error in errors if isinstance(error, CheckError)), errors[0])
    others = "".join(
        f"\nthe front end {way} failed too: {_reason(error)}"
        for way, error in zip(WAYS, errors, strict=True)
        if error is not first
    )
    if isinstance(first, CaptureError):
        combined: Exception = CaptureError(f"{first.problem}{others}", address=first.address, reason=first.reason)
    elif isinstance(first, CheckError):
        combined = CheckError(f"{first}{others}", reason=first.reason)
    else:
        return first
    combined.__cause__ = first
    return combined


def capture(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
    frontend: FrontEnd,
    *,
    dynamic: bool = False,
    opset: int | None = None,
) -> Exported:
    """Capture and translate a model with a front end; ``auto`` is ``dynamo``, then ``torchscript`` if that fails.

    Raises:
        CaptureError: The front end failed; with ``auto``, both failed.
        InputsError: The inputs do not fit.
        UsageError: The front end does not write this opset.
    """
    with collected() as messages:
        exported = _capture(model, inputs, frontend, dynamic=dynamic, opset=opset)
    return dataclasses.replace(exported, messages=tuple(messages))


def _capture(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
    frontend: FrontEnd,
    *,
    dynamic: bool,
    opset: int | None,
) -> Exported:
    if frontend != "auto":
        return FRONT_ENDS[frontend](model, inputs, dynamic=dynamic, opset=opset)
    try:
        return dynamo.capture_by_dynamo(model, inputs, dynamic=dynamic, opset=opset)
    except CaptureError as error:
        first = error
    try:
        exported = torchscript.capture_by_tracing(model, inputs, dynamic=dynamic, opset=opset)
    except UsageError as second:
        raise CaptureError(
            f"{first.problem}\nthe front end torchscript failed too: {_reason(second)}",
            address=first.address,
            reason=first.reason,
        ) from first
    return dataclasses.replace(exported, dynamo_failure=first.problem)


def _reason(error: Exception) -> str:
    return error.problem if isinstance(error, CaptureError) else str(error)

"""The choice of the front end: the one asked for or, with ``auto``, the first whose file passes its check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from modelexport.capture import FrontEnd
from modelexport.capture.front_ends import FRONT_ENDS, asks_for_values
from modelexport.core.text import text_without_paths
from modelexport.errors import CaptureError, CheckError, UntaggedNodeError, UsageError

_T = TypeVar("_T")


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
        UsageError: The first front end refuses the inputs or the options; no other one is tried.
    """
    if frontend != "auto":
        return export_by(frontend, (), keep_anyway)
    tried: list[Attempt] = []
    errors: list[CaptureError | CheckError | UntaggedNodeError | UsageError] = []
    for way in FRONT_ENDS:
        try:
            return export_by(way, tuple(tried), False)
        except (CaptureError, CheckError, UntaggedNodeError) as error:
            errors.append(error)
        except UsageError as error:
            if not errors:
                raise
            errors.append(error)
        tried.append(Attempt(way, _reason(errors[-1]), asks_for_values(errors[-1])))
    failed = [way for way, error in zip(FRONT_ENDS, errors, strict=True) if isinstance(error, CheckError)]
    if keep_anyway and failed:
        return export_by(failed[0], tuple(attempt for attempt in tried if attempt.frontend != failed[0]), True)
    raise _none_passes(errors)


def _none_passes(errors: Sequence[Exception]) -> Exception:
    """One error for all attempts: the first, preferably of one that wrote a file, with the reasons of the others."""
    first = next((error for error in errors if isinstance(error, CheckError)), errors[0])
    others = ""
    for way, error in zip(FRONT_ENDS, errors, strict=True):
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


def _reason(error: Exception) -> str:
    return text_without_paths(error.problem if isinstance(error, CaptureError) else str(error))

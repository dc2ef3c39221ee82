"""The front end that a caller asks for, or, with ``auto``, the first one that can."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from modelexport.capture import OPSETS, FrontEnd, dynamo, torchscript
from modelexport.capture.exported import Exported
from modelexport.core.messages import collected
from modelexport.errors import CaptureError, UsageError

FRONT_ENDS: Mapping[str, Callable[..., Exported]] = {
    "dynamo": dynamo.capture_by_dynamo,
    "torchscript": torchscript.capture_by_tracing,
}


def check_opset(opset: int | None) -> None:
    """Refuse an opset that no front end writes, before anything runs.

    Raises:
        UsageError: It is one.
    """
    if opset is not None and opset not in OPSETS:
        raise UsageError(f"no front end writes opset {opset}: choose one from {OPSETS[0]} to {OPSETS[-1]}")


def capture(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
    frontend: FrontEnd,
    *,
    dynamic: bool = False,
    opset: int | None = None,
) -> Exported:
    """Capture and translate a model with a front end; ``auto`` is ``dynamo``, and ``torchscript`` where that fails.

    Raises:
        CaptureError: The front end gave up; with ``auto``, both did.
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
        said = second.problem if isinstance(second, CaptureError) else str(second)
        raise CaptureError(
            f"{first.problem}\nneither with the front end torchscript: {said}",
            address=first.address,
            reason=first.reason,
        ) from first
    return dataclasses.replace(exported, dynamo_failure=first.problem)

"""The front end that a caller asks for, or, with ``auto``, the first one that can."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from modelexport.capture import FrontEnd, dynamo, torchscript
from modelexport.capture.exported import Exported
from modelexport.errors import CaptureError, UsageError

FRONT_ENDS: Mapping[str, Callable[..., Exported]] = {
    "dynamo": dynamo.capture_by_dynamo,
    "torchscript": torchscript.capture_by_tracing,
}


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
    if frontend != "auto":
        return FRONT_ENDS[frontend](model, inputs, dynamic=dynamic, opset=opset)
    try:
        return dynamo.capture_by_dynamo(model, inputs, dynamic=dynamic, opset=opset)
    except CaptureError as error:
        first = error
    try:
        exported = torchscript.capture_by_tracing(model, inputs, dynamic=dynamic, opset=opset)
    except UsageError as second:
        message = f"{first}\nneither with the front end torchscript: {_reason(second)}"
        raise CaptureError(message, address=first.address, reason=first.reason) from first
    return dataclasses.replace(exported, dynamo_failure=_reason(first))


def _reason(error: UsageError) -> str:
    return str(error).removeprefix("the model cannot be exported: ")

"""Captures a model with a front end: warnings, constants, answers for questions of values, and repairs of the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn

from modelexport.capture import FrontEnd, dynamo, torchscript
from modelexport.capture.exported_graph import Exported
from modelexport.capture.fixed_answers import fixed_answers
from modelexport.capture.front_end_options import DEFAULTS, FrontEndOptions
from modelexport.capture.patches import warn_of_versions
from modelexport.capture.presumed_answers import DECISIONS, Presumed
from modelexport.capture.repairs.resizing import copy_along_equal_sizes, give_sizes_of_pytorch, pick_pixels_as_pytorch
from modelexport.capture.script_modules import scripts_converted
from modelexport.capture.value_decisions import DecisionError, inputs_read
from modelexport.core.collected_messages import collected
from modelexport.core.text import chained
from modelexport.errors import CaptureError, UsageError
from modelexport.graph.narrow_to_float32 import compute_in_float32, lacks_types
from modelexport.pytorch.calls.traced_tree import has_narrow_weights
from modelexport.pytorch.inputs.other_sizes import fix_broadcast_axes
from modelexport.pytorch.inputs.prepared_inputs import AUTO, prepare_inputs
from modelexport.pytorch.nested_tensors import Inputs
from modelexport.pytorch.runs.questions_of_values import most_times_asked
from modelexport.runtime.wider_integers import compute_in_wider_integers

FRONT_ENDS: Mapping[FrontEnd, Callable[..., Exported]] = {
    "dynamo": dynamo.capture_by_dynamo,
    "torchscript": torchscript.capture_by_tracing,
}
"""The front ends, in the order in which ``auto`` tries them."""


def capture(model: nn.Module, inputs: Inputs, frontend: FrontEnd, options: FrontEndOptions = DEFAULTS) -> Exported:
    """Capture and translate a model with a front end.

    Args:
        options: With ``auto`` among the constants, arguments whose values decide what the model does are constants.

    Raises:
        CaptureError: The front end failed.
        InputsError: The inputs do not fit.
        UsageError: The front end does not write this opset.
    """
    warn_of_versions()
    with collected() as messages:
        exported = _capture_by(frontend, model, inputs, options)
    return replace(exported, messages=tuple(messages))


def _capture_by(frontend: FrontEnd, model: nn.Module, inputs: Inputs, options: FrontEndOptions) -> Exported:
    """Capture with one front end. Where the model decides by the values of inputs, offer those or take them."""
    named = [name for name in options.constants if name != AUTO]
    try:
        return _capture_with(frontend, model, inputs, replace(options, constants=named))
    except CaptureError as error:
        offered = [name for name in inputs_read(model, inputs) if name not in named]
        if not offered:
            raise
        failure = error
    with_offered = replace(options, constants=[*named, *offered])
    if AUTO in options.constants:
        return _capture_by(frontend, model, inputs, with_offered)
    with contextlib.suppress(UsageError):  # what does not help is not offered
        _capture_with(frontend, model, inputs, with_offered)
        failure = CaptureError(failure.problem, address=failure.address, reason=failure.reason, constants=offered)
    raise failure from failure.__cause__


def _capture_with(frontend: FrontEnd, model: nn.Module, inputs: Inputs, options: FrontEndOptions) -> Exported:
    with scripts_converted(model, inputs) as captured:
        exported = _captured(FRONT_ENDS[frontend], captured, inputs, options)
    if has_narrow_weights(model):
        opsets = exported.model.opset_imports
        compute_in_float32(exported.model, lambda node: lacks_types(node, opsets))
    else:
        compute_in_float32(exported.model)
    compute_in_wider_integers(exported.model)
    copy_along_equal_sizes(exported.model)
    pick_pixels_as_pytorch(exported.model)
    give_sizes_of_pytorch(exported.model)
    prepared = prepare_inputs(model, inputs, options.constants)
    fix_broadcast_axes(exported.model, prepared.inputs)
    return replace(exported, constants=prepared.constants)


def asks_for_values(error: BaseException) -> bool:
    """Whether a capture failed because Python decides by values."""
    return any(isinstance(cause, (*DECISIONS, DecisionError)) for cause in chained(error))


def _captured(
    front_end: Callable[..., Exported], model: nn.Module, inputs: Inputs, options: FrontEndOptions
) -> Exported:
    """Capture a model; once more, with its questions answered, if Python asks of values."""
    try:
        return front_end(model, inputs, options)
    except CaptureError as error:
        if not asks_for_values(error):
            raise
        failure = error
    fixed = fixed_answers(model, inputs, options.constants, dynamic=options.dynamic)
    most = most_times_asked(model, inputs)
    with contextlib.suppress(CaptureError):
        exported = front_end(model, inputs, options, Presumed(fixed, most))
        return replace(exported, answered=True)
    raise failure from failure.__cause__

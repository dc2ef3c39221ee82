"""Comparing outputs on inputs that find more errors than the given ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnxruntime

from modelexport.errors import UsageError
from modelexport.pytorch.variations import telling_inputs
from modelexport.runtime.sessions import run_session
from modelexport.tagged.file import TaggedFile
from modelexport.verify.differences import compare_outputs
from modelexport.verify.feeding import feeds
from modelexport.verify.matching import WHOLE_UNITS
from modelexport.verify.verdicts import OtherInputs

Inputs = Mapping[str, Any] | Sequence[Any]


def run_others(
    inputs: Inputs,
    tagged: TaggedFile,
    session: onnxruntime.InferenceSession,
    run_module: Callable[[Inputs], list[Any]],
) -> list[OtherInputs]:
    """Compare the outputs on each variation of the inputs that the model accepts."""
    found = []
    for what, other in telling_inputs(inputs, tagged.model):
        try:
            right = run_module(other)
        except Exception as error:  # a model may raise anything for inputs that it does not accept
            reason = f"the model does not accept them ({type(error).__name__})"
            found.append(OtherInputs(what=what, status="not compared", reason=reason))
            continue
        try:
            outputs = run_session(session, feeds(other, session))
        except UsageError as error:
            found.append(OtherInputs(what=what, status="differ", reason=str(error)))
            continue
        compared = compare_outputs(list(outputs), right, list(outputs.values()), units=WHOLE_UNITS)
        wrong = [one for one in compared if one.status != "agree"]
        reason = f"{wrong[0].name}: {wrong[0].reason}" if wrong else ""
        found.append(OtherInputs(what=what, status="differ" if wrong else "agree", reason=reason, outputs=compared))
    return found

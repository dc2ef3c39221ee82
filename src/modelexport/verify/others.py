"""Comparing outputs on inputs that find more errors than the given ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import onnxruntime

from modelexport.errors import UsageError
from modelexport.pytorch.variations import telling_inputs
from modelexport.runtime.evidence import Evidence
from modelexport.runtime.sessions import run_session
from modelexport.tagged.file import TaggedFile
from modelexport.verify.differences import worst
from modelexport.verify.feeding import feeds
from modelexport.verify.verdicts import OtherInputs
from modelexport.verify.whole import WholeOutputs

Inputs = Mapping[str, Any] | Sequence[Any]


def run_others(
    inputs: Inputs,
    tagged: TaggedFile,
    session: onnxruntime.InferenceSession,
    run_module: Callable[[str, Inputs], list[Any]],
    run: Callable[[str, Inputs], Evidence],
    provider: str,
) -> list[OtherInputs]:
    """Compare the outputs on each variation of the inputs that the model accepts.

    Args:
        run_module: Called with what the inputs are, and these: gives what the model returns.
        run: The same with all that it shows; where outputs differ, choices among equal scores are looked for.
    """
    found = []
    for what, other in telling_inputs(inputs, tagged.model):
        try:
            right = run_module(what, other)
        except Exception as error:  # a model may raise anything for inputs that it does not accept
            reason = f"the model does not accept them ({type(error).__name__})"
            found.append(OtherInputs(what=what, status="not compared", reason=reason))
            continue
        try:
            given = feeds(other, session)
            outputs = run_session(session, given)
        except UsageError as error:
            found.append(OtherInputs(what=what, status="differ", reason=str(error)))
            continue
        whole = WholeOutputs(right, partial(run, what, other), measured=False)
        compared = whole.compare_with_ties(outputs, tagged, given, provider)
        own = worst(compared)
        status, reason = (own.status, f"{own.name}: {own.reason}") if own else ("not compared", "there are no outputs")
        found.append(
            OtherInputs(what=what, status=status, reason=reason if status != "agree" else "", outputs=compared)
        )
    return found

"""Compares the outputs on inputs that find more than the given ones: padded masks, other ids and numbers, other sizes.

Both sides run in float64, so that a file that computes the same agrees on any inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from modelexport.graph.nodes import is_cached_attention
from modelexport.graph.size_conditions import conditions_of, fitting
from modelexport.pytorch.inputs.covering_sizes import CoveringSizes
from modelexport.pytorch.inputs.other_sizes import sizes_at_limits, symbol_sizes, too_large, with_sizes, without_parts
from modelexport.pytorch.inputs.variations import (
    PADDED,
    PADDED_AT_THE_END,
    beyond_example,
    magnified,
    padded_at_the_end,
    variations_in_one,
    variations_one_by_one,
)
from modelexport.pytorch.nested_tensors import Inputs
from modelexport.pytorch.runs.other_answers import with_other_answers
from modelexport.traces.array_differences import Verdict
from modelexport.verify.compared_runs import Compared, output_differences
from modelexport.verify.model_and_file import ModelAndFile
from modelexport.verify.verify_report import OtherInputs


@dataclass
class Others:
    """The comparisons."""

    compared: list[OtherInputs] = field(default_factory=list)
    wrong: Compared | None = None
    """The first comparison in which something is wrong."""


def compare_others(pair: ModelAndFile, inputs: Inputs, kept: frozenset[str], *, selects: bool = False) -> Others:
    """Compare on all variations of the inputs at once, or one by one if the model does not accept them so.

    Args:
        kept: The names of tensors that do not change: the file has their values.
        selects: The model branches on values, and the file always takes one of the branches.
    """
    others, tagged = Others(), pair.tagged

    def compared(what: str, other: Inputs, *, finite: bool = False) -> OtherInputs:
        """Compare on some inputs; or only whether what is finite in PyTorch is so in the file."""
        try:
            right = pair.returned(other)
        except Exception as error:  # a model may raise anything for inputs that it does not accept
            return OtherInputs(
                what=what, status="not compared", reason=f"the model does not accept them ({type(error).__name__})"
            )
        if finite and not all(np.isfinite(verdict).all() for verdict in right):
            return OtherInputs(what=what, status="not compared", reason="the model overflows")
        if any(array.size for array in right) and pair.agrees(other, right):
            return OtherInputs(what=what, status="agree")
        # Choices among equal scores, random numbers and decisions by bytes or types are told apart here.
        judged = pair if finite or not pair.accepts(other) else pair.settled(other)
        _, compared_run = judged.compared(other, {})
        verdict = _verdict_on_outputs(what, compared_run)
        if finite and all(output.relative != float("inf") for output in verdict.outputs):
            return OtherInputs(what=what, status="not compared", reason="rounding grows")
        if verdict.status == "differ" and _is_of_empty_rows(what, right):
            return OtherInputs(what=what, status="not compared", reason="the model returns NaN for rows without tokens")
        if verdict.status == "differ" and others.wrong is None:
            others.wrong = compared_run
        return verdict

    together = variations_in_one(inputs, tagged.model, kept)
    first = compared(*together) if together is not None else None
    if first is not None:
        others.compared.append(first)
    if first is None or first.status == "not compared":
        for what, other in variations_one_by_one(inputs, tagged.model, kept):
            verdict = compared(what, other)
            if verdict.status == "not compared" and PADDED in what:
                verdict = compared(PADDED_AT_THE_END, padded_at_the_end(inputs, kept))
            others.compared.append(verdict)
    others.compared += _with_other_sizes(pair, inputs, compared)
    limits = sizes_at_limits(inputs, tagged.model)
    rare = chain(
        limits,
        beyond_example(inputs, tagged.model, kept),
        with_other_answers(pair.model, inputs, kept) if selects else (),
    )
    beyond = [compared(what, other) for what, other in rare]
    beyond += [compared(what, other, finite=True) for what, other in magnified(inputs, kept)]
    others.compared += [verdict for verdict in beyond if verdict.status != "not compared"]
    return others


def _with_other_sizes(
    pair: ModelAndFile, inputs: Inputs, compared: Callable[[str, Inputs], OtherInputs]
) -> Iterator[OtherInputs]:
    """Comparisons at a covering set of sizes that the conditions of the file allow."""
    model = pair.tagged.model
    conditions, example = conditions_of(model), symbol_sizes(inputs, model)
    cover = CoveringSizes(example, lambda sizes, free: fitting(conditions, sizes, free))
    for sizes in cover:
        if too_large(inputs, model, sizes):
            continue
        other = with_sizes(inputs, model, sizes)
        if without_parts(inputs, other) or not pair.accepts(other):
            continue
        changed = ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items() if size != example[symbol])
        verdict = compared(f"other sizes, {changed}", other)
        if verdict.status != "not compared":
            cover.accept(sizes)
            yield verdict
    if cover.unchanged:
        what, reason = f"other sizes of {', '.join(cover.unchanged)}", "none that were tried could be compared"
        yield OtherInputs(what=what, status="not compared", reason=reason)


def _verdict_on_outputs(what: str, compared: Compared) -> OtherInputs:
    """The verdict on the outputs."""
    if compared.failed is not None:
        # The kernels of attentions over a cache refuse several new tokens after it for more than one row.
        refuses = is_cached_attention(compared.failed.node) and "INVALID_ARGUMENT" in str(compared.failed)
        return OtherInputs(what=what, status="not compared" if refuses else "differ", reason=str(compared.failed))
    outputs = output_differences(compared)
    if not outputs:
        return OtherInputs(what=what, status="not compared", reason="there are no outputs")
    worst = next((item for item in outputs if item.status == "differ"), None)
    if worst is not None:
        return OtherInputs(what=what, status="differ", reason=f"{worst.name}: {worst.reason}", outputs=outputs)
    status: Verdict = next(
        (item for item in ("agree", "tie") if any(o.status == item for o in outputs)), "not compared"
    )
    reason = outputs[0].reason if status == "not compared" else ""
    return OtherInputs(what=what, status=status, reason=reason, outputs=outputs)


def _is_of_empty_rows(what: str, right: Sequence[Any]) -> bool:
    """Whether masks are padded and the model returns NaN, as for a row without tokens, which is not compared."""
    return PADDED in what and any(array.dtype.kind == "f" and bool(np.isnan(array).any()) for array in right)

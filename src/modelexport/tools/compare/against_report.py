"""The report of ``compare A B --numbers``: the loss of each output and of each call of the second file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from modelexport.core.calls import ModuleCall
from modelexport.core.result_display import CallReport, Rows, error_text
from modelexport.core.text import percent_text
from modelexport.tables.html_page import Section
from modelexport.traces.array_differences import SAID, Difference, Verdict, compare_arrays, is_floating, verdict_of
from modelexport.verify.verify_report import CallStatus

_LISTED = 5
"""How many calls that are off a page lists."""


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """One value in both files."""

    difference: Difference
    """The verdict with the tolerance for the narrowest floating-point type in the two files."""
    norm: float | None = None
    """The norm of the difference divided by the norm of the value in the first file."""
    cosine: float | None = None
    """The cosine of the angle between the two as vectors; ``None`` if one is zero."""


class CallLoss(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of one call."""

    address: str
    tag: str
    status: CallStatus
    reason: str = ""
    nodes: int = 0
    """Its own nodes in the second file."""
    end_to_end: Loss | None = None
    """The worst of the values that it returns, in one run of each file."""
    per_module: Loss | None = None
    """The worst of the values that its own nodes compute from the first file's values."""


class AgainstReport(CallReport[CallLoss], msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of two tagged files."""

    outputs: list[Loss]
    calls: list[CallLoss]
    """Every call of the first file, in the order in which they began, in the run in which an output is off worst."""
    inputs: str
    """``reference values`` of the first file, ``random``, or the number of runs of the data."""
    provider: str
    bound: float
    """How far off a value may be, as a share of its norm: the bound, or the tolerance."""
    judged: Sequence[str] = ()
    """The outputs that ``bound`` judges: all if it was given, the first of floating-point numbers if it is that of the
    recipe beside the second file. Without any, both files have to compute the same."""
    first_beyond: str | None = None
    """The address of the first call to return values that are further off than ``bound``, end to end."""
    cause: str = ""
    """What of ONNX Runtime makes the outputs of the second file wrong, if its nodes compute the same as the first's."""
    notes: list[str] = []
    """What ONNX Runtime computes otherwise than the nodes of the files, and products that may saturate."""

    def __repr__(self) -> str:
        worst = f"; the largest loss in {ranked[0].address or '.'}" if (ranked := self.ranked) else ""
        return f"<AgainstReport: {self.verdict}; {len(self.outputs)} outputs, {len(self.calls)} calls{worst}>"

    def _table(self) -> Rows:
        yield "call", "tag", "status", "per module", "end to end"
        for call in self.ranked:
            losses = (None if loss is None else loss.norm for loss in (call.per_module, call.end_to_end))
            yield call.address or ".", call.tag, call.status, *map(error_text, losses)

    @property
    def document(self) -> Any:
        return {"ranked": [call.address for call in self.ranked]} | super().document

    @property
    def errors(self) -> dict[ModuleCall, float]:
        """How far off what each call computes from the first file's values is, as a share of its size."""
        losses = {call.address: call.per_module for call in self.calls}
        return {ModuleCall.parse(a): own.norm for a, own in losses.items() if own is not None and own.norm is not None}

    @property
    def verdict(self) -> Verdict:
        """``differ`` if anything does, ``not compared`` if nothing was, else ``agree``."""
        statuses: set[str | None] = {self.verdict_on(loss) for loss in self.outputs}
        if not self.judged:
            statuses |= {call.status for call in self.calls}
        return verdict_of(statuses)

    def verdict_on(self, output: Loss) -> Verdict | None:
        """Whether an output agrees, within the bound if it is judged by one; ``None`` if only others are judged."""
        status = output.difference.status
        if not self.judged or status == "not compared":
            return status
        if output.difference.name not in self.judged:
            return None
        return "agree" if weight_of(output) <= self.bound else "differ"

    def section(self, other: str) -> Section:
        """What a page says of the comparison with a file of this name."""
        lines = [
            ("file", other),
            *(("note", note) for note in self.notes),
            (
                f"first module that is off by more than {percent_text(self.bound)}",
                "none" if self.first_beyond is None else f"#{self.first_beyond}",
            ),
        ]
        for loss in self.outputs:
            norm = f"off by {percent_text(loss.norm)} of its norm" if loss.norm is not None else ""
            cosine = f"cosine {loss.cosine:.6f}" if loss.cosine is not None else ""
            lines.append((loss.difference.name, ", ".join(filter(None, [self.verdict_on(loss), norm, cosine]))))
        lines += [
            (f"#{call.address}", f"off by {percent_text(weight_of(call.per_module))} of its norm by itself")
            for call in self.listed[:_LISTED]
        ]
        return f"Against another file: {SAID[self.verdict]}", lines

    @property
    def ranked(self) -> list[CallLoss]:
        """The calls whose own results can be compared, the largest loss first."""
        measured = [call for call in self.calls if call.per_module is not None]
        return sorted(measured, key=lambda call: -weight_of(call.per_module))

    @property
    def listed(self) -> list[CallLoss]:
        """The calls of ``ranked`` that are further off than ``bound``, alone or end to end; if it judges no output,
        those that differ.
        """
        if not self.judged:
            return [call for call in self.ranked if call.status != "agree"]
        return [call for call in self.ranked if max(map(weight_of, (call.per_module, call.end_to_end))) > self.bound]


def weight_of(loss: Loss | None) -> float:
    """The order of losses: values that cannot be compared are worst, the others by the norm."""
    if loss is None:
        return -1.0
    if loss.difference.nans or (loss.norm is None and loss.difference.status == "differ"):
        return float("inf")
    return loss.norm if loss.norm is not None else loss.difference.absolute or 0.0


def measure_loss(name: str, right: Any, actual: Any, allowed: float) -> Loss:
    """The loss of a value of the second file.

    Args:
        allowed: The tolerance for the narrowest type in the two files: values of wider types are computed from it.
    """
    if right.shape != actual.shape or not (is_floating(right) and is_floating(actual)):
        return Loss(difference=compare_arrays(name, right, actual))
    a, b = right.astype(np.float64), actual.astype(np.float64)
    difference = compare_arrays(name, a, b, allowed=allowed)
    difference = msgspec.structs.replace(difference, dtype=str(actual.dtype))
    if difference.relative == np.inf:  # numbers that are finite in one of the two alone have no distance
        return Loss(difference=difference)
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    length, other = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    return Loss(
        difference=difference,
        norm=float(np.linalg.norm(b - a)) / length if length else None,
        cosine=float(a @ b) / (length * other) if length and other else None,
    )

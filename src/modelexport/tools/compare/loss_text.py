"""What a file that was made from another loses, by module, as text."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from modelexport.core.text import align, percent_text, plural
from modelexport.terminal.show_verification import LISTED, calls_with_nodes

if TYPE_CHECKING:
    from modelexport.tools.compare.against_report import AgainstReport, Loss


_LOSSES = (
    "OWN: how far off what a module returns is, as a share of its size, if it gets the first file's values; "
    "IN ALL: the same in one run from the inputs"
)
"""What the columns of the tables mean."""


def format_losses(report: AgainstReport) -> str:
    """The calls that lose most, the worst first, the outputs, and the verdict."""
    rows: list[tuple[str, ...]] = [("MODULE", "CALL", "OWN", "IN ALL")]
    listed = report.listed
    for call in listed[:LISTED]:
        losses = map(_size_of_error, (call.per_module, call.end_to_end))
        rows.append((call.tag.rpartition("/")[2], call.address or ".", *losses))
    left = f"{plural(len(listed) - LISTED, 'call', 'that lose')} less not shown" if len(listed) > LISTED else ""
    table = [align(rows, right={2, 3}), *([left] if left else []), _LOSSES, ""] if listed else []
    statuses = Counter(call.status for call in report.calls)
    unknown = f", {statuses['not compared']:,} not compared" if statuses["not compared"] else ""
    calls, limit = calls_with_nodes(statuses), percent_text(report.bound)
    same = f"alone, {statuses['agree']:,} of {calls} compute the same within {limit}{unknown}"
    if statuses["no nodes"] == len(report.calls):
        same = "no call was compared: no node of the second file belongs to a call of the first (see `retag`)"
    outputs = ", ".join(
        f"{loss.difference.name}{':' if loss.norm is None else ' is off by'} {_size_of_error(loss)}"
        for loss in report.outputs
    )
    within = {"agree": "within", "differ": "not within"}.get(report.verdict, "") if report.judged else ""
    bound = f"{within} {limit}" if within else ""
    beyond = f"in one run the first call off by more than {limit} is {report.first_beyond}"
    facts = [
        outputs,
        bound,
        same if not report.judged else "",
        *([beyond] if report.first_beyond and report.verdict == "differ" else []),
        f"inputs: {report.inputs}",
    ]
    cause = [f"the second file is right, but {report.cause} makes its outputs wrong"] if report.cause else []
    return "\n".join([*table, *report.notes, *cause, f"{report.verdict}: {'; '.join(filter(None, facts))}"])


def _size_of_error(loss: Loss | None) -> str:
    """How far off a value is, as a share of its size; why it cannot be said otherwise."""
    if loss is None:
        return ""
    return loss.difference.reason or loss.difference.status if loss.norm is None else percent_text(loss.norm)

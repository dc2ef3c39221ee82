"""What the parts of a pipeline return beside what PyTorch returns, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelexport.core.text import align, plural
from modelexport.terminal.show_verification import format_parameters

if TYPE_CHECKING:
    from modelexport.tools.pipelines.verify_by_pipeline import PipelineReport


def format_pipeline(report: PipelineReport) -> str:
    """A line for each call of a part, one for each result, and a summary line."""
    rows: list[tuple[object, ...]] = [("PART", "CALL", "STATUS", "BY ITSELF", "END TO END", "")]
    for call in report.calls:
        through = "" if call.end_to_end is None else f"{call.end_to_end:.1e}"
        difference = f"{f'first in {call.module}: ' if call.module else ''}{call.reason}"
        rows.append((call.part, call.index, call.status, f"{call.relative:.1e}", through, difference))
    rows += [
        (output.name, "", output.status, "", f"{output.relative or 0.0:.1e}", output.reason)
        for output in report.results
    ]
    equal = sum(call.status == "agree" for call in report.calls)
    summary = f"{equal} of {plural(len(report.calls), 'call')} return what PyTorch returns"
    facts = [summary, *format_parameters(report.parameters)]
    if report.in_pytorch:
        facts.append(f"{', '.join(report.in_pytorch)} ran in PyTorch")
    legend = (
        "BY ITSELF: error of one call on PyTorch's inputs, as a share of what it returns; END TO END: with the errors "
        "of all calls before it"
    )
    return "\n".join([align(rows, right={1, 3, 4}), legend, "; ".join(facts)])

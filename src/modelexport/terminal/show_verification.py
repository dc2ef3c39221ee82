"""Verifications as text and as JSON. ``format_*`` returns text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from modelexport.core.result_display import error_text
from modelexport.core.text import align, first_few, indent, plural, shortened
from modelexport.terminal.printing import Style, styled

if TYPE_CHECKING:
    from modelexport.traces.array_differences import Difference
    from modelexport.verify.verify_report import FalseClaim, ParameterReport, VerifyReport

LISTED = 10
"""Claims, or calls, that are listed."""
_ERRORS = (
    "END TO END: error of what a module returns in one run from the inputs, as a share of its size; "
    "PER MODULE: the same, with PyTorch's values before the module"
)


def format_verification(report: VerifyReport) -> str:
    """The verification in an export: a line and the notes if everything agrees, otherwise the text of ``verify``."""
    if not report.agrees:
        return format_verify(report)
    outputs = plural(len(report.outputs), "output")
    verb = "agrees" if len(report.outputs) == 1 else "agree"
    line = f"verified: {outputs} {verb} with PyTorch, largest difference {report.largest:.1e}; {_counts(report)}"
    return "\n".join([line, *(f"  {note}" for note in report.notes)])


def format_verify(report: VerifyReport, *, verbose: bool = False) -> str:
    """The differences, the calls that were not compared and why, and a summary line.

    Args:
        verbose: Also how many owners of nodes were confirmed, and how the calls were compared.
    """
    lines = []
    if report.diverging is not None:
        first = report.diverging
        code = f"  {first.line}" if first.line else ""
        lines += [f"first diverging: {first.address or '.'}  {first.tag}{code}", f"  {first.reason}"]
    if report.cause:
        lines.append(f"the file is right, but {report.cause} makes its outputs wrong")
    lines += [f"{o.name}: {o.status} ({o.reason})" for o in report.outputs if o.status != "agree"]
    lines += [f"with {o.what}: {o.status} ({o.reason})" for o in report.others if o.status != "agree"]
    lines += [_claim(claim) for claim in report.claims[:LISTED]]
    if len(report.claims) > LISTED:
        lines.append(f"{plural(len(report.claims) - LISTED, 'claim')} more")
    lines += report.notes
    rows = [("MODULE", "CALL", "STATUS", "END TO END", "PER MODULE", "")]
    rows += [
        (*verdict_cells(call), _error(call.end_to_end), _error(call.per_module), shortened(call.reason, 100))
        for call in report.calls
        if call.status in ("differ", "not compared", "tie")
    ]
    if len(rows) > 1:
        lines += ["", align(rows, right={3, 4}), _ERRORS, ""]
    colour: Style = "green" if report.agrees else "red" if report.verdict == "differ" else "yellow"
    return "\n".join([*lines, styled(_summary(report), colour), *(_evidence(report) if verbose else [])])


def _claim(claim: FalseClaim) -> str:
    """A false statement of the file's metadata, or a note on a document that would be written otherwise."""
    claimed, truth = shortened(claim.claimed, 80), shortened(claim.found, 80)
    if claim.document == "metadata":
        return f"metadata, {claim.where}: says {claimed}, but it is {truth}"
    return f"note: the document {claim.document} says of {claim.where}: {claimed}; it would be written as {truth}"


def _summary(report: VerifyReport) -> str:
    summary = [f"{report.verdict}: {_counts(report)}"]
    if report.parameters is not None:
        summary += format_parameters(report.parameters)
        statuses = {o.status for o in report.outputs} | {o.status for o in report.others}
        if not report.parameters.agrees and statuses == {"agree"}:
            summary.append("with the inputs that were tried, no output is off by more than the tolerance")
    return "; ".join(summary)


def format_parameters(report: ParameterReport) -> list[str]:
    """How many parameters are the model's, which are not, and how many were not compared."""
    wrong, untraced = [*report.unaccounted, *report.differing], len(report.untraced)
    compared = plural(report.used - untraced, "parameter")
    texts = [f"{compared} equal to the model's"]
    if wrong:
        texts = [f"{len(wrong):,} of {compared} missing or different: {first_few(wrong)}"]
    if untraced:
        texts.append(f"{plural(untraced, 'parameter')} not compared: a tool quantized, folded, packed or merged them")
    return texts


def _evidence(report: VerifyReport) -> list[str]:
    """The lines that ``-v`` adds: owners of nodes, other inputs, and weights that were changed in memory."""
    owners = report.owners
    lines = [
        f"owners of nodes: {owners.confirmed:,} confirmed, {owners.contradicted:,} contradicted, "
        f"{owners.not_confirmable:,} not confirmable"
    ]
    compared = [comparison.what for comparison in report.others if comparison.status == "agree"]
    lines += [f"outputs agree as well with {', '.join(compared)}"] if compared else []
    return lines + ["the weights were changed in memory, in PyTorch and in the file"] * report.perturbed


def _counts(report: VerifyReport) -> str:
    statuses = Counter(call.status for call in report.calls)
    texts = [f"{statuses['agree'] + statuses['tie']:,} of {calls_with_nodes(statuses)} agree"]
    texts += [f"{statuses[status]:,} {status}" for status in ("tie", "differ", "not compared") if statuses[status]]
    if report.owners.contradicted:
        texts.append(f"{plural(report.owners.contradicted, 'node')} of other calls")
    return ", ".join(texts)


def calls_with_nodes(statuses: Counter[Any]) -> str:
    return plural(sum(statuses.values()) - statuses["no nodes"], "call")


def verdict_cells(call: Any) -> tuple[str, str, str]:
    depth = call.tag.count("/") - 1
    return indent(depth, call.tag.rpartition("/")[2]), call.address or ".", call.status


def _error(difference: Difference | None) -> str:
    return error_text(difference.relative if difference is not None else None)


def format_chain(differences: Sequence[Difference]) -> str:
    """Each output of the stages, and its difference from that of the whole file."""
    return "\n".join(
        f"{difference.name}: {difference.status}"
        + (f", {difference.absolute:.1e}" if difference.absolute is not None else "")
        + (f" ({difference.reason})" if difference.reason else "")
        for difference in differences
    )

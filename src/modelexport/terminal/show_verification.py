"""Verifications as text and as JSON. ``format_*`` returns text."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from modelexport.core.result_display import error_text
from modelexport.core.text import align, first_few, indent, percent_text, plural, shortened
from modelexport.terminal.printing import Style, styled

if TYPE_CHECKING:
    from modelexport.traces.array_differences import Difference
    from modelexport.verify.against_report import AgainstReport, CallLoss, Loss
    from modelexport.verify.verify_report import CallVerdict, FalseClaim, ParameterReport, VerifyReport

_MOST = 10
"""Claims, or calls, that are listed."""
_ERRORS = (
    "END TO END: error of what a module returns in one run from the inputs, as a share of its size; "
    "PER MODULE: the same, with PyTorch's values before the module"
)
_LOSSES = (
    "OWN: how far off what a module returns is, as a share of its size, if it gets the first file's values; "
    "IN ALL: the same in one run from the inputs"
)
"""What the columns of the tables mean."""


def format_verification(report: VerifyReport) -> str:
    """The verification in an export: one line if everything agrees, otherwise the text of ``verify``."""
    if not report.agrees:
        return format_verify(report)
    outputs = plural(len(report.outputs), "output")
    verb = "agrees" if len(report.outputs) == 1 else "agree"
    return f"verified: {outputs} {verb} with PyTorch, largest difference {report.largest:.1e}; {_counts(report)}"


def format_verify(report: VerifyReport, *, verbose: bool = False) -> str:
    """The differences, the calls that were not compared and why, and a summary line.

    Args:
        verbose: Also how many owners of nodes were confirmed, and how the calls were compared.
    """
    lines = []
    if report.diverging is not None:
        first = report.diverging
        lines += [f"first diverging: {first.address or '.'}  {first.tag}", f"  {first.reason}"]
    if report.cause:
        lines.append(f"the file is right, but {report.cause} makes its outputs wrong")
    lines += [f"{o.name}: {o.status} ({o.reason})" for o in report.outputs if o.status != "agree"]
    lines += [f"with {o.what}: {o.status} ({o.reason})" for o in report.others if o.status != "agree"]
    lines += [_claim(claim) for claim in report.claims[:_MOST]]
    if len(report.claims) > _MOST:
        lines.append(f"{plural(len(report.claims) - _MOST, 'claim')} more")
    lines += report.notes
    rows = [("MODULE", "CALL", "STATUS", "END TO END", "PER MODULE", "")]
    rows += [
        (*_verdict_cells(call), _error(call.end_to_end), _error(call.per_module), shortened(call.reason, 100))
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
    """What ``-v`` adds."""
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
    texts = [f"{statuses['agree'] + statuses['tie']:,} of {_with_nodes(statuses)} agree"]
    texts += [f"{statuses[status]:,} {status}" for status in ("tie", "differ", "not compared") if statuses[status]]
    if report.owners.contradicted:
        texts.append(f"{plural(report.owners.contradicted, 'node')} of other calls")
    return ", ".join(texts)


def _with_nodes(statuses: Counter[Any]) -> str:
    return plural(sum(statuses.values()) - statuses["no nodes"], "call")


def format_losses(report: AgainstReport) -> str:
    """The calls that lose most, the worst first, the outputs, and the verdict."""
    rows = [("MODULE", "CALL", "OWN", "IN ALL")]
    listed = report.listed
    rows += [
        (*_verdict_cells(call)[:2], _size_of_error(call.per_module), _size_of_error(call.end_to_end))
        for call in listed[:_MOST]
    ]
    left = f"{plural(len(listed) - _MOST, 'call')} that lose less not shown" if len(listed) > _MOST else ""
    table = [align(rows, right={2, 3}), *([left] if left else []), _LOSSES, ""] if listed else []
    statuses = Counter(call.status for call in report.calls)
    unknown = f", {statuses['not compared']:,} not compared" if statuses["not compared"] else ""
    calls, limit = _with_nodes(statuses), percent_text(report.bound)
    same = f"{statuses['agree']:,} of {calls} compute the same within {limit}{unknown}"
    if statuses["no nodes"] == len(report.calls):
        same = "no call was compared: no node of the second file belongs to a call of the first (see `retag`)"
    outputs = ", ".join(
        f"{loss.difference.name}{':' if loss.norm is None else ' is off by'} {_size_of_error(loss)}"
        for loss in report.outputs
    )
    within = {"agree": "within", "differ": "not within"}.get(report.verdict, "") if report.judged else ""
    bound = f"{within} {limit}" if within else ""
    beyond = f"first call off by more than {limit}: {report.first_beyond}"
    facts = [
        outputs,
        bound,
        same if not report.judged else "",
        *([beyond] if report.first_beyond and report.verdict == "differ" else []),
        f"inputs: {report.inputs}",
    ]
    return "\n".join([*table, f"{report.verdict}: {'; '.join(filter(None, facts))}"])


def _size_of_error(loss: Loss | None) -> str:
    """How far off a value is, as a share of its size; why it cannot be said otherwise."""
    if loss is None:
        return ""
    return loss.difference.reason or loss.difference.status if loss.norm is None else percent_text(loss.norm)


def _verdict_cells(call: CallVerdict | CallLoss) -> tuple[str, str, str]:
    depth = call.tag.count("/") - 1
    return indent(depth, call.tag.rpartition("/")[2]), call.address or ".", call.status


def _error(difference: Difference | None) -> str:
    return error_text(difference.relative if difference is not None else None)

"""Verifications as text and as JSON. ``format_*`` returns text."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from modelexport.cli.printing import Style, styled
from modelexport.core.text import align, indent, plural, shortened

if TYPE_CHECKING:
    from modelexport.traces.array_differences import Difference
    from modelexport.verify.against_file import AgainstReport, CallLoss, Loss
    from modelexport.verify.verify_report import CallVerdict, FalseClaim, VerifyReport

_CLAIMS = 10
_ERRORS = (
    "END TO END: error of what a module returns in one run from the inputs, as a share of its size; "
    "PER MODULE: the same, with PyTorch's values before the module"
)
_LOSSES = (
    "PER MODULE: largest difference of what a module returns, with the first file's values before it; END TO END: the "
    "same in one run from the inputs; NORM: the difference as a share of the size; COSINE: of the angle between both"
)
"""What the columns of the tables mean."""


def format_verification(report: VerifyReport) -> str:
    """The verification in an export: one line if everything agrees, otherwise the text of ``verify``."""
    if not report.agrees:
        return format_verify(report)
    outputs = plural(len(report.outputs), "output")
    verb = "agrees" if len(report.outputs) == 1 else "agree"
    return f"verified: {outputs} {verb} with PyTorch, largest difference {report.largest:.1e}; {_counts(report)}"


def format_verify(report: VerifyReport) -> str:
    """The differences, the calls that were not compared and why, and a summary line."""
    lines = []
    if report.diverging is not None:
        first = report.diverging
        lines += [f"first diverging: {first.address or '.'}  {first.tag}", f"  {first.reason}"]
    if report.cause:
        lines.append(f"the file is right, but {report.cause} makes its outputs wrong")
    lines += [f"{o.name}: {o.status} ({o.reason})" for o in report.outputs if o.status != "agree"]
    lines += [f"with {o.what}: {o.status} ({o.reason})" for o in report.others if o.status != "agree"]
    lines += [_claim(claim) for claim in report.claims[:_CLAIMS]]
    if len(report.claims) > _CLAIMS:
        lines.append(f"{plural(len(report.claims) - _CLAIMS, 'claim')} more")
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
    return "\n".join([*lines, styled(_summary(report), colour)])


def _claim(claim: FalseClaim) -> str:
    """A false statement of the file's metadata, or a note on a document that would be written otherwise."""
    claimed, found = shortened(claim.claimed, 80), shortened(claim.found, 80)
    if claim.document == "metadata":
        return f"metadata, {claim.where}: says {claimed}, but it is {found}"
    return f"note: the document {claim.document} says of {claim.where}: {claimed}; it would be written as {found}"


def _summary(report: VerifyReport) -> str:
    summary = [f"{report.verdict}: {_counts(report)}"]
    if report.parameters is not None:
        wrong = [*report.parameters.unaccounted, *report.parameters.differing]
        told = f"missing or different: {', '.join(wrong)}" if wrong else "equal to the model's"
        summary.append(f"{plural(report.parameters.used, 'parameter')} {told}")
        if report.parameters.untraced:
            summary.append(
                f"{len(report.parameters.untraced)} of them not compared: another tool folded or packed them"
            )
    if report.perturbed:
        summary.append("calls were compared with changed weights on both sides")
    return "; ".join(summary)


def _counts(report: VerifyReport) -> str:
    statuses = Counter(call.status for call in report.calls)
    told = [f"{statuses['agree'] + statuses['tie']:,} of {_with_nodes(statuses)} with nodes agree"]
    told += [f"{statuses[one]:,} {one}" for one in ("tie", "differ", "not compared") if statuses[one]]
    owners = report.owners
    told.append(f"owners of nodes: {owners.confirmed:,} confirmed, {owners.contradicted:,} contradicted")
    told.append(f"{owners.not_confirmable:,} not confirmable")
    return ", ".join(told)


def _with_nodes(statuses: Counter[Any]) -> str:
    return plural(sum(statuses.values()) - statuses["no nodes"], "call")


def verify_document(report: VerifyReport) -> dict[str, Any]:
    """The document that ``modelexport verify --json`` prints."""
    document = msgspec.structs.asdict(report)
    return {"verdict": report.verdict, "agrees": report.agrees, "diverging": report.diverging, **document}


def format_losses(report: AgainstReport, most: int = 20) -> str:
    """The calls with the largest losses, the worst first, and a summary line."""
    rows = [("MODULE", "CALL", "STATUS", "PER MODULE", "NORM", "END TO END", "NORM", "COSINE")]
    ranked = report.ranked
    for call in ranked[:most]:
        made, through = call.per_module, call.end_to_end
        rows.append(
            (
                *_verdict_cells(call),
                *_loss_cells(made),
                *_loss_cells(through),
                "" if through is None or through.cosine is None else f"{through.cosine:.6f}",
            )
        )
    left = f"{plural(len(ranked) - most, 'call')} with smaller losses not shown" if len(ranked) > most else ""
    statuses = Counter(call.status for call in report.calls)
    summary = (
        f"{report.verdict}: {statuses['agree']:,} of {_with_nodes(statuses)} with nodes agree, "
        f"{statuses['not compared']:,} not compared; inputs: {report.inputs}"
    )
    outputs = [
        f"{one.difference.name}: {one.difference.status}, {' of norm '.join(_loss_cells(one))}"
        for one in report.outputs
    ]
    first = report.first_beyond
    beyond = f"first beyond {report.bound:g} of its norm, end to end: {first or 'none'}"
    table = [align(rows, right={3, 4, 5, 6, 7}), *([left] if left else []), *([_LOSSES] if ranked else [])]
    return "\n".join([*table, "", beyond, *outputs, summary])


def against_document(report: AgainstReport) -> dict[str, Any]:
    """The document that ``modelexport verify --against --json`` prints."""
    ranked = [call.address for call in report.ranked]
    return {"verdict": report.verdict, "agrees": report.agrees, "ranked": ranked, **msgspec.structs.asdict(report)}


def _verdict_cells(call: CallVerdict | CallLoss) -> tuple[str, str, str]:
    depth = call.tag.count("/") - 1
    return indent(depth, call.tag.rpartition("/")[2]), call.address or ".", call.status


def _error(difference: Difference | None) -> str:
    return "" if difference is None or difference.relative is None else f"{difference.relative:.1e}"


def _largest(difference: Difference | None) -> str:
    return "" if difference is None or difference.absolute is None else f"{difference.absolute:.1e}"


def _loss_cells(loss: Loss | None) -> tuple[str, str]:
    if loss is None:
        return "", ""
    return _largest(loss.difference), "" if loss.norm is None else f"{loss.norm:.1e}"

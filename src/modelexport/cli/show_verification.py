"""Verifications for people and as JSON. ``format_*`` returns text."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from modelexport.core.text import align, indent, plural, shortened

if TYPE_CHECKING:
    from modelexport.verify.descendant import AgainstReport, CallLoss, Loss
    from modelexport.verify.differences import Difference
    from modelexport.verify.verdicts import CallVerdict, VerifyReport


def format_verification(report: VerifyReport) -> str:
    """One line for each output that does not agree, or one line for all."""
    if report.agrees:
        outputs = plural(len(report.outputs), "output")
        verb = "agrees" if len(report.outputs) == 1 else "agree"
        return f"verified: {outputs} {verb} with PyTorch, largest difference {report.largest:.1e}"
    wrong = [output for output in report.outputs if output.status != "agree"]
    return "\n".join(
        f"{output.name}: {output.status} ({output.reason}"
        + (f", largest difference {output.absolute:.1e})" if output.absolute is not None else ")")
        for output in wrong
    )


def format_verify(report: VerifyReport) -> str:
    """The first diverging module, the calls that differ or cannot be compared, and a line that sums them up."""
    lines = []
    if report.diverging is not None:
        first = report.diverging
        lines += [f"first diverging: {first.address or '.'}  {first.tag}", f"  {first.reason}"]
    lines += [f"{o.name}: {o.status} ({o.reason})" for o in report.outputs if o.status != "agree"]
    rows = [("MODULE", "CALL", "STATUS", "CHAINED", "ISOLATED", "")]
    rows += [
        (*_verdict_cells(call), _largest(call.end_to_end), _largest(call.per_module), shortened(call.reason, 100))
        for call in report.calls
        if call.status in ("differ", "not comparable")
    ]
    if len(rows) > 1:
        lines += ["", align(rows, right={3, 4}), ""]
    statuses = Counter(call.status for call in report.calls)
    end_to_end = max((call.end_to_end.absolute or 0.0 for call in report.calls if call.end_to_end), default=0.0)
    per_module = max((call.per_module.absolute or 0.0 for call in report.calls if call.per_module), default=0.0)
    summary = [
        f"{statuses['agree']:,} of {plural(len(report.calls) - statuses['no nodes'], 'call')} with nodes agree",
        f"largest difference {end_to_end:.1e} end to end, {per_module:.1e} per module",
    ]
    if report.parameters is not None:
        wrong = [*report.parameters.unaccounted, *report.parameters.differing]
        told = f"not in the file or not the model's: {', '.join(wrong)}" if wrong else "all the model's"
        summary.append(f"{plural(report.parameters.used, 'parameter')} {told}")
    return "\n".join([*lines, "; ".join(summary)])


def verify_document(report: VerifyReport) -> dict[str, Any]:
    """What ``modelexport verify --json`` prints."""
    return {"agrees": report.agrees, "diverging": report.diverging, **msgspec.structs.asdict(report)}


def format_losses(report: AgainstReport, most: int = 20) -> str:
    """The calls that lose most, the worst on top, and a line that sums them up."""
    rows = [("MODULE", "CALL", "STATUS", "ISOLATED", "NORM", "CHAINED", "NORM", "COSINE")]
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
    left = f"{plural(len(ranked) - most, 'call')} that lose less not shown" if len(ranked) > most else ""
    statuses = Counter(call.status for call in report.calls)
    summary = (
        f"{statuses['agree']:,} of {plural(len(report.calls) - statuses['no nodes'], 'call')} with nodes agree, "
        f"{statuses['not comparable']:,} cannot be compared; inputs: {report.inputs}"
    )
    outputs = [
        f"{one.difference.name}: {one.difference.status}, {' of norm '.join(_loss_cells(one))}"
        for one in report.outputs
    ]
    return "\n".join([align(rows, right={3, 4, 5, 6, 7}), *([left] if left else []), "", *outputs, summary])


def against_document(report: AgainstReport) -> dict[str, Any]:
    """What ``modelexport verify --against --json`` prints."""
    ranked = [call.address for call in report.ranked]
    return {"agrees": report.agrees, "ranked": ranked, **msgspec.structs.asdict(report)}


def _verdict_cells(call: CallVerdict | CallLoss) -> tuple[str, str, str]:
    depth = call.tag.count("/") - 1
    return indent(depth, call.tag.rpartition("/")[2]), call.address or ".", call.status


def _largest(difference: Difference | None) -> str:
    return "" if difference is None or difference.absolute is None else f"{difference.absolute:.1e}"


def _loss_cells(loss: Loss | None) -> tuple[str, str]:
    if loss is None:
        return "", ""
    return _largest(loss.difference), "" if loss.norm is None else f"{loss.norm:.1e}"

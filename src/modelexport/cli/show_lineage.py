"""The results of ``retag``, ``optimize`` and ``adopt`` as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from modelexport.core.text import align, plural, shortened
from modelexport.tagged.tree import format_coverage, format_tree

if TYPE_CHECKING:
    from modelexport.lineage.adoption import Adopted
    from modelexport.lineage.retagging import RetagReport


def format_retag(report: RetagReport, most: int = 20) -> str:
    """The facts that are known about a retagged file, and those that are not."""
    common = f"{report.common:,} of {plural(report.values, 'value')} come from the tagged file"
    lines = [f"{format_coverage(report.coverage)}; {common}"]
    for title, nodes in (("contain operations of several", report.fused), ("are between several", report.unclear)):
        if nodes:
            lines += ["", f"{plural(len(nodes), 'node')} that {title} calls:"]
            rows = [(f"  {n.op_type}", n.name, ", ".join(_shortest(n.calls))) for n in nodes[:most]]
            lines += [align(rows), *_left_out(nodes, most)]
    if report.initializers:
        count = plural(len(report.initializers), "initializer")
        lines += ["", f"{count} that may come from any of these parameters:"]
        lines += [f"  {one.name}: {', '.join(one.parameter)}" for one in report.initializers[:most]]
        lines += _left_out(report.initializers, most)
    lines.append("")
    if report.unrecorded:
        count = plural(report.unrecorded, "initializer")
        lines.append(f"{count} changed in a way that is not recorded: update-weights refuses them")
    if report.lost:
        lines.append(f"folded and lost: {shortened(', '.join(report.lost), 200)}")
    if report.gone:
        lines.append(f"{plural(len(report.gone), 'call')} without nodes now: {shortened(', '.join(report.gone), 200)}")
    if report.inlined:
        lines.append("local functions were inlined")
    return "\n".join([*lines, f"wrote {', '.join(report.files)}"])


def _shortest(calls: Sequence[str], most: int = 4) -> list[str]:
    return [*calls[:most], *([f"and {len(calls) - most} more"] if len(calls) > most else [])]


def _left_out(listed: Sequence[object], most: int) -> list[str]:
    return [f"  and {len(listed) - most} more; --json lists all"] if len(listed) > most else []


def format_adopted(adopted: Adopted) -> str:
    """The facts about an adopted file: tree, coverage, sources, and what could not be determined."""
    sources = ", ".join(f"{source} {count:,}" for source, count in adopted.sources.items())
    lines = [format_tree(adopted.tree, adopted.coverage, adopted.operators), f"sources: {sources or 'none'}"]
    if adopted.repeated:
        some = ", ".join(path or "." for path in adopted.repeated[:5])
        more = f" and {len(adopted.repeated) - 5} more" if len(adopted.repeated) > 5 else ""
        lines.append(f"may be several calls that look like one: {some}{more}")
    return "\n".join([*lines, f"wrote {', '.join(adopted.files)}"])

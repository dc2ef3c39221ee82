"""Files whose tags were restored or found, as text and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelexport.core.text import align, first_few, plural, rest_of, shortened
from modelexport.tagged.tree_display import format_coverage, format_tree
from modelexport.traces.array_differences import worst

if TYPE_CHECKING:
    from modelexport.lineage.adoption import Adopted
    from modelexport.lineage.retagging import RetagReport
    from modelexport.traces.array_differences import Difference


_LISTED = 20
"""Lines of one kind."""


def format_retag(report: RetagReport) -> str:
    """The facts that are known about a retagged file, and those that are not."""
    common = f"{report.common:,} of {plural(report.values, 'value')} come from the tagged file"
    lines = [f"{format_coverage(report.coverage)}; {common}"]
    for verb, title, nodes in (
        ("contain", "operations of several", report.fused),
        ("are", "between several", report.unclear),
    ):
        if nodes:
            lines += ["", f"{plural(len(nodes), 'node', f'that {verb}')} {title} calls:"]
            rows = [(f"  {n.op_type}", n.name, first_few(n.calls, 4)) for n in nodes[:_LISTED]]
            lines += [align(rows), *rest_of(nodes, _LISTED)]
    if report.initializers:
        count = plural(len(report.initializers), "initializer")
        lines += ["", f"{count} that may come from any of these parameters:"]
        lines += [f"  {changed.name}: {', '.join(changed.parameter)}" for changed in report.initializers[:_LISTED]]
        lines += rest_of(report.initializers, _LISTED)
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
    if report.outputs is not None and (largest := worst(report.outputs)) is not None:
        lines.append(f"outputs compared with {plural(len(report.tried), 'input')}: {_how_far(largest)}")
    elif report.tried:
        lines.append(f"outputs were not compared: {shortened(report.tried[0], 200)}")
    return "\n".join([*lines, f"wrote {', '.join(report.files)}"])


def _how_far(largest: Difference) -> str:
    if largest.status == "not compared":
        return f"{largest.name} was not compared ({largest.reason})"
    return f"{largest.name} is off by {largest.relative or 0:.1e} of its size, most of all"


def format_adopted(adopted: Adopted) -> str:
    """The facts about an adopted file: tree, coverage, sources, and what could not be determined."""
    sources = ", ".join(f"{source} {count:,}" for source, count in adopted.sources.items())
    lines = [format_tree(adopted.tree, adopted.coverage), f"sources: {sources or 'none'}"]
    if adopted.repeated:
        lines.append(f"may be several calls that look like one: {first_few(path or '.' for path in adopted.repeated)}")
    return "\n".join([*lines, f"wrote {', '.join(adopted.files)}"])


def adopted_document(adopted: Adopted) -> dict[str, Any]:
    """The document that ``modelexport adopt --json`` prints."""
    return {
        "path": str(adopted.path),
        "files": adopted.files,
        "coverage": adopted.coverage,
        "sources": adopted.sources,
        "repeated": adopted.repeated,
        "tree": adopted.tree,
    }

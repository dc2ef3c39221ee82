"""``report``: the facts, the verification and the cost of a file on one page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from modelexport.core.calls import ModuleCall
from modelexport.core.text import plural
from modelexport.measure import columns
from modelexport.measure.costs import cost
from modelexport.measure.page import Section, write_page
from modelexport.measure.profiles import profile
from modelexport.measure.table import NodeFigures, Table
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tagged.reference import reference_path
from modelexport.verify.reference import verify_reference
from modelexport.verify.verdicts import VerifyReport


def with_errors(table: Table, report: VerifyReport) -> Table:
    """A table with a column ``error``: the largest absolute difference of the values that each call computes itself."""
    errors = {
        ModuleCall.parse(call.address): made.absolute
        for call in report.calls
        if (made := call.per_module or call.end_to_end) is not None and made.absolute is not None
    }
    return replace(
        table,
        columns=(*table.columns, columns.ERROR),
        direct={**table.direct, columns.ERROR.name: errors},
    )


def write_report_page(
    file: str | Path, output: Path, *, sizes: Mapping[str, int] | None = None, profiled: bool = False
) -> None:
    """Write one page with the tree, coverage, cost and, if reference values are beside the file, verification.

    Args:
        sizes: Names of dynamic axes to sizes.
        profiled: Also run it, and show the time of its modules.

    Raises:
        FileFormatError: The file is missing or has no tags.
        OutputError: The page cannot be written.
        UsageError: It does not have a dynamic axis named in ``sizes``, or cannot run.
    """
    tagged = read_tagged(file)
    table: Table = cost(tagged, sizes)
    sections: list[Section] = [_facts(tagged)]
    if reference_path(tagged.path).exists() and tagged.hierarchy is not None:
        verified = verify_reference(tagged.path)
        table = with_errors(table, verified)
        sections.append(_verification(verified))
    main = "flops"
    if profiled:
        measured = profile(tagged, sizes=sizes).table
        table = replace(
            table,
            columns=(columns.SECONDS, columns.SHARE, *table.columns),
            nodes=(*table.nodes, *(_timed_only(measured))),
            notes=(*table.notes, *measured.notes),
        )
        main = "seconds"
    write_page(table, output, main=main, sections=sections)


def _timed_only(table: Table) -> list[NodeFigures]:
    """The nodes of a profile, with only their seconds."""
    return [
        replace(node, figures={columns.SECONDS.name: node.figures[columns.SECONDS.name]}, runs=())
        for node in table.nodes
    ]


def _facts(tagged: TaggedFile) -> Section:
    coverage, model = tagged.coverage, tagged.model
    kinds = (f"{getattr(coverage, name):,} {name}" for name in coverage.__struct_fields__)
    return "File", [
        ("path", tagged.path.name),
        ("opset", ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in model.opset_imports.items())),
        ("calls", f"{len(tagged.calls):,}"),
        ("nodes", ", ".join(kinds)),
        ("inputs", ", ".join(f"{value.name} {value.shape}" for value in model.graph.inputs)),
        ("outputs", ", ".join(f"{value.name} {value.shape}" for value in model.graph.outputs)),
    ]


def _verification(report: VerifyReport) -> Section:
    lines = [("outputs", f"{plural(len(report.outputs), 'output')}, largest difference {report.largest:.1e}")]
    lines += [(status, plural(count, "call")) for status, count in report.counts.items()]
    if report.diverging is not None:
        lines.append(("first diverging", f"{report.diverging.address or '.'}: {report.diverging.reason}"))
    return ("Verification: agrees" if report.agrees else "Verification: differs"), lines

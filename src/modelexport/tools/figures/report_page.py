"""``report``: the facts, the verification and the cost of a file on one page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from modelexport.core.text import plural
from modelexport.graph.node_owners import owner_of
from modelexport.packages.measured_parts import DECODE, common_sizes, profile_parts, uses_of
from modelexport.runtime.devices import CPU
from modelexport.runtime.saturating_products import saturation_notes
from modelexport.tables import columns
from modelexport.tables.columns import AGAINST, RATIO
from modelexport.tables.costs import cost
from modelexport.tables.graph_pairs import NodePair, count_marks, pair_nodes
from modelexport.tables.html_page import Page, Section, write_page
from modelexport.tables.profiles import ModuleProfile
from modelexport.tables.side_by_side import cost_against
from modelexport.tables.table import Table
from modelexport.tagged.documents.hierarchy_sidecar import graph_value
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tools import function_of_option
from modelexport.tools.figures.values import FileValues, values
from modelexport.traces.array_differences import SAID
from modelexport.traces.reference_values import reference_path
from modelexport.verify.against_reference import verify_reference
from modelexport.verify.verify_report import VerifyReport

_LISTED = 5
"""How many calls that are off a section lists."""
_TIMES = (columns.SECONDS.name, columns.NODE_SECONDS.name, columns.SHARE.name, AGAINST.name, RATIO.name)


def write_report_page(
    path: str | Path,
    output: Path,
    *,
    sizes: Mapping[str, int] | None = None,
    profiled: bool = False,
    provider: str = CPU,
    against: Path | None = None,
    verified: Mapping[str, VerifyReport | None] | None = None,
    with_values: bool = False,
    data: Path | None = None,
    processor: Path | None = None,
) -> None:
    """Write one page with the verification, facts, tree, coverage and cost of a file.

    Of a package, each part is on the page.

    Args:
        profiled: Also run it, and show the time of its modules.
        against: A file that was made from this one, such as a quantized one: its error by module is on the page instead
            of the verification, and with ``profiled`` its time.
        verified: The verification of the file, under an empty name, or of the parts; without it a file is compared with
            reference values, if these are beside it.

        with_values: Also run it node by node, and show the values.
        data: The inputs for that; by default those of the reference values, or random ones.
        processor: The folder of the tokenizer or image processor that they need.

    Raises:
        FileFormatError: A file is missing or damaged.
        OutputError: The page cannot be written.
        UsageError: It does not have a dynamic axis named in ``sizes``, or cannot run.
    """
    path, sizes, verified = Path(path), sizes or {}, verified or {}
    if against is not None:
        sizes = common_sizes(path, against, sizes)
    uses = uses_of(path, sizes)
    tables = {name: use.named(cost(use.tagged, use.sizes), path) for name, use in uses.items()}
    times = profile_parts(path, sizes=sizes, provider=provider, against=against) if profiled else {}
    pages = []
    for name, table in tables.items():
        tagged = uses[name].tagged
        known = verified.get(name, verified.get(DECODE))  # a part that takes prompts and single tokens is there twice
        computed = values(tagged, data, processor=processor) if with_values or data is not None else None
        pages.append(_page(name, table, tagged, times.get(name), against, known, computed))
    write_page(output, *pages)


def _page(
    part: str,
    table: Table,
    tagged: TaggedFile,
    measured: ModuleProfile | None,
    against: Path | None,
    verified: VerifyReport | None,
    computed: FileValues | None,
) -> Page:
    sections: list[Section] = []
    other_file, other_cost, pairs, differs = None, None, list[NodePair](), False
    other = against.name if against is not None else ""
    if against is not None:
        losses = function_of_option("report --against")(tagged.path, against)
        differs = losses.verdict == "differ"
        other_cost = cost(against)
        table = cost_against(table, other_cost).with_column(columns.ERROR, losses.errors)
        sections.append(losses.section(against.name))
        other_file = read_tagged(against)
        pairs = pair_nodes(tagged, other_file)
        sections.append(_differences(pairs))
    else:
        if verified is None and reference_path(tagged.path).exists() and tagged.hierarchy is not None:
            verified = verify_reference(tagged.path)
        if verified is not None:
            table = table.with_column(columns.ERROR, verified.errors)
        sections.append(_verification(verified, tagged))
    if computed is not None:
        table = computed.beside(table)
        sections.append(computed.section)
    sections.append(_facts(tagged))
    page = Page(
        table,
        columns.ERROR.name if differs else columns.FLOPS.name,
        sections,
        part,
        other,
        _sources(tagged),
        file=tagged,
        ranges=computed.found.ranges if computed is not None else None,
        other_file=other_file,
        other_shapes=other_cost.shapes if other_cost is not None else None,
        pairs=pairs,
    )
    if measured is None:
        return page
    timed = [  # with their seconds alone: cost has its own peak memory
        replace(node, figures={name: node.figures[name] for name in _TIMES if name in node.figures}, runs=())
        for node in measured.table.nodes
    ]
    table = replace(
        table,
        columns=(*(c for c in measured.table.columns if c.name in _TIMES), *table.columns),
        nodes=(*table.nodes, *timed),
        notes=(*table.notes, *measured.table.notes),
    )
    return replace(page, table=table, main=columns.SECONDS.name, sections=[*measured.sections, *sections])


def _sources(tagged: TaggedFile) -> dict[str, str]:
    """The Python module and the line of the class of each module, if the sidecar has it."""
    modules = tagged.hierarchy.modules if tagged.hierarchy is not None else []
    return {m.path: f"{m.qualified_class.removesuffix(f'.{m.class_name}')}:{m.line}" for m in modules if m.line}


def _facts(tagged: TaggedFile) -> Section:
    coverage, model = tagged.coverage, tagged.model
    kinds = {name: count for name, count in msgspec.structs.asdict(coverage).items() if count}
    facts = [
        ("made by", f"{model.producer_name or ''} {model.producer_version or ''}".strip()),
        ("opset", ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in model.opset_imports.items())),
        ("module calls", f"{len(tagged.calls):,}"),
        ("nodes", f"{len(tagged.nodes):,}; their calls: {', '.join(f'{n:,} {name}' for name, n in kinds.items())}"),
        ("inputs", ", ".join(map(str, map(graph_value, model.graph.inputs)))),
        ("outputs", ", ".join(map(str, map(graph_value, model.graph.outputs)))),
        ("saturates", "".join(saturation_notes(tagged.nodes, tagged.path.name))),
    ]
    return "File", [fact for fact in facts if fact[1]]


def _differences(pairs: Sequence[NodePair]) -> Section:
    """How many nodes differ, and how: for each kind of difference, the first module and the number of modules."""
    calls = defaultdict[tuple[str, str], dict[str, None]](dict)
    for pair in pairs:
        node = pair.first or pair.second
        if pair.mark and node is not None and (pair.first is not None or pair.mark == "added"):
            owner = owner_of(node)
            calls[pair.mark, pair.why][owner.call.address if owner is not None else ""] = None
    lines = []
    for mark, count in count_marks(pairs).items():
        lines.append((mark, plural(count, "node")))
        ways = [(why, list(found)) for (of, why), found in calls.items() if of == mark]
        for why, found in ways[:_LISTED]:
            several = f"first of {len(found)} modules" if len(found) > 1 else ""
            lines.append((f"#{found[0]}", ", ".join(filter(None, [why, several]))))
        if len(ways) > _LISTED:
            lines.append(("", f"and {len(ways) - _LISTED} more, below the graph"))
    return "Differences of the graphs", lines or [("none", "every node is the same in both files")]


def _verification(report: VerifyReport | None, tagged: TaggedFile) -> Section:
    if report is None:
        name = tagged.path.name
        how = f"verify {name} --model MODEL" if tagged.found_calls is None else f"compare {name} OTHER.onnx --numbers"
        return "Verification", [("not run", f"modelexport {how}")]
    lines = [("outputs", f"{plural(len(report.outputs), 'output')}, largest difference {report.largest:.1e}")]
    lines += [(status, plural(count, "call")) for status, count in report.counts.items()]
    if report.diverging is not None:
        first = report.diverging
        lines += [("first diverging", f"#{first.address}"), (first.line, first.reason)]
    wrong = [call for call in report.calls if call.status == "differ" and call != report.diverging]
    lines += [(f"#{call.address}", call.reason) for call in wrong[:_LISTED]]
    return f"Verification: {SAID[report.verdict]}", lines

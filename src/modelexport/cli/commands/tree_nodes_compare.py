"""Commands that read tagged files: `tree`, `nodes`, `compare`, and `documents`, which writes tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from modelexport.cli.printing import (
    document_of_parts,
    fitting_depth,
    format_headings,
    left_out,
    print_parts,
    print_result,
)
from modelexport.cli.shared_options import FILE, FILE_OR_FOLDER, JSON, SELECTORS
from modelexport.core.declared_options import argument, option
from modelexport.core.text import align, nearest, plural
from modelexport.errors import UsageError
from modelexport.format.keys import SIDECAR_SUFFIX

if TYPE_CHECKING:
    from modelexport.tagged.file import NodeRow


def documents(file: Path = FILE) -> None:
    """Write the tables that `export --no-documents` omitted, from the tags in FILE."""
    from modelexport.tagged.file import read_tagged
    from modelexport.tagged.table_writing import write_tables

    written = write_tables(read_tagged(file))
    print(f"wrote {', '.join(map(str, written))}")
    if not (sidecar := file.with_suffix(SIDECAR_SUFFIX)).exists():
        print(f"{sidecar.name} has facts of the model that are not in the file, such as the names of arguments: export")


def tree(
    file: Path = FILE_OR_FOLDER,
    depth: int | None = option(None, "Show N levels below the root.", metavar="N"),
    check: bool = option(False, "Also check that the weights files are unchanged."),
    as_json: bool = JSON,
) -> None:
    """Show the module tree in FILE, or in each part of FOLDER; without a tree, what the file has."""
    from modelexport.files.linked_weights import weights_faults
    from modelexport.graph.node_owners import owned_operators
    from modelexport.tagged.file import read_tagged
    from modelexport.tagged.file_overview import format_overview, overview
    from modelexport.tagged.package import files_of
    from modelexport.tagged.tree_display import format_tree, tree_rows, untagged_operators

    documents: dict[str, dict[str, Any]] = {}
    texts: dict[str, str] = {}
    faults: list[str] = []
    for name, part in files_of(file).items():
        tagged = read_tagged(part, checked=not check)
        operators = list(owned_operators(tagged.model))
        untagged = untagged_operators(operators)
        rows = tree_rows(operators, tagged.calls, tagged.tags.__getitem__)
        levels = [row.depth for row in rows if row.nodes]
        to = depth if as_json else fitting_depth(levels, depth)
        shown = [row for row in rows if to is None or row.depth <= to]
        faults_of_part = weights_faults(tagged.model) if check else []
        faults += faults_of_part
        documents[name] = {"path": str(part), "coverage": tagged.coverage, "tree": shown, "untagged": untagged}
        documents[name] |= {"weights": faults_of_part} if check else {}
        more = left_out(levels, to) if depth is None else ""
        texts[name] = "\n".join([format_tree(shown, tagged.coverage, untagged), *([more] if more else [])])
        if tagged.found_calls is not None and len(tagged.calls) == 1:
            facts = overview(tagged)
            documents[name]["file"], texts[name] = facts, format_overview(facts, str(part))
    text = "\n".join([format_headings(texts), *dict.fromkeys(faults)])
    print_result(document_of_parts(documents), lambda: text, as_json=as_json)
    if faults:
        raise typer.Exit(1)


def nodes(file: Path = FILE_OR_FOLDER, modules: Sequence[str] = SELECTORS, as_json: bool = JSON) -> None:
    """List the nodes of module calls and of the calls inside them, in each part that runs them."""
    from modelexport.tagged.file import read_tagged
    from modelexport.tagged.package import parts_with

    listed = {}
    for name, part in parts_with(file, *modules).items():
        tagged = read_tagged(part)
        listed[name] = tagged.describe_nodes(tagged.select(*modules))
    print_parts(listed, _format_nodes, as_json=as_json)


def _format_nodes(nodes: Sequence[NodeRow]) -> str:
    table = [("OPERATOR", "NAME", "CALL", "EVIDENCE", "TAG", "ALSO OWNED BY")]
    table += [
        (n.op_type, n.name, n.call or ".", n.evidence, n.source_module, ", ".join(c or "." for c in n.also))
        for n in nodes
    ]
    return f"{align(table)}\n\n{plural(len(nodes), 'node')}"


def compare(
    first: Path = argument(..., "An ONNX file, tagged or not, or a package.", metavar="A.onnx|A/"),
    second: Path = argument(..., "The file or package to compare with.", metavar="B.onnx|B/"),
    selectors: Sequence[str] = argument((), "Only these calls and those inside them.", metavar="[SELECTOR]..."),
    values: bool = option(False, "Compare the elements of parameters; reads all weights."),
    fail_on: str = option("", "Exit status 1 if structure,weights,outputs,cost differ.", metavar="ASPECTS"),
    inputs: Path | None = option(None, "Inputs for comparing outputs: .npz, .safetensors, or JSON.", metavar="FILE"),
    markdown: bool = option(False, "Print a Markdown summary."),
    as_json: bool = JSON,
) -> None:
    """Show how two files differ, module by module. The exit status is 0 even if they do, except with --fail-on."""
    from modelexport.cli import show_comparison
    from modelexport.measure.change_checks import ASPECTS, check_changes
    from modelexport.tagged.package import files_of

    asked = [aspect.strip() for aspect in fail_on.split(",") if aspect.strip()]
    aspects = [aspect for aspect in ASPECTS if aspect in asked]
    if unknown := sorted(set(asked) - set(ASPECTS)):
        near = nearest(unknown[0], ASPECTS)
        raise UsageError(f"--fail-on takes {', '.join(ASPECTS)}, not {', '.join(unknown)}{near}")
    if markdown and as_json:
        raise UsageError("give --markdown or --json, not both")
    first_files, second_files = files_of(first), files_of(second)
    if first_files.keys() != second_files.keys():
        names = [", ".join(files).strip() or "one file" for files in (first_files, second_files)]
        raise UsageError(f"{first} and {second} have different parts: {names[0]}, and {names[1]}; compare two files")
    reports = {
        name: check_changes(
            first_files[name], second_files[name], aspects, values=values, modules=selectors, inputs=inputs
        )
        for name in first_files
    }
    documents = {name: show_comparison.changes_document(report) for name, report in reports.items()}
    show = show_comparison.format_markdown if markdown else show_comparison.format_changes
    text = format_headings({name: show(report) for name, report in reports.items()})
    print_result(document_of_parts(documents), lambda: text, as_json=as_json)
    if any(report.failed for report in reports.values()):
        raise typer.Exit(1)

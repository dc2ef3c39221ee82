"""Commands that only read tagged files: `tree`, `nodes`, `compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelexport.cli.printing import format_headings, named_files, print_json, print_parts
from modelexport.cli.shared_options import FileOrFolderArgument, JsonOption, SelectorsArgument
from modelexport.cli.terminal import fitting_depth, left_out
from modelexport.core.text import nearest
from modelexport.errors import UsageError

if TYPE_CHECKING:
    from modelexport.tagged.skimming import Skimmed


def tree(
    file: FileOrFolderArgument,
    depth: Annotated[int | None, typer.Option(metavar="N", help="Show N levels below the root.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Also check that the weights files are unchanged.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the module tree in FILE, or in each part of FOLDER, with the nodes of each call."""
    from modelexport.tagged.tree import format_tree, tree_rows, untagged_operators

    documents: dict[str, dict[str, Any]] = {}
    texts: dict[str, str] = {}
    faults: list[str] = []
    for name, part in named_files(file).items():
        found = _skimmed(part, checked=not check)
        untagged = untagged_operators(found.nodes)
        rows = tree_rows(found.nodes, found.calls, found.tags.__getitem__)
        levels = [row.depth for row in rows if row.nodes]
        to = depth if as_json else fitting_depth(levels, depth)
        shown = [row for row in rows if to is None or row.depth <= to]
        own = _changed(part) if check else []
        faults += own
        documents[name] = {"path": str(part), "coverage": found.coverage, "tree": shown, "untagged": untagged}
        documents[name] |= {"weights": own} if check else {}
        more = left_out(levels, to) if depth is None else ""
        texts[name] = "\n".join([format_tree(shown, found.coverage, untagged), *([more] if more else [])])
    if as_json:
        print_json({"parts": documents} if file.is_dir() else documents[""])
    else:
        print(format_headings(texts))
        for fault in dict.fromkeys(faults):
            print(fault)
    if faults:
        raise typer.Exit(1)


def _skimmed(file: Path, *, checked: bool) -> Skimmed:
    from modelexport.tagged.skimming import skim

    found = skim(file, checked=checked)
    if found is None:  # the reader of the whole file is slow to import
        from modelexport.tagged.file import read_tagged

        found = read_tagged(file).skimmed
    return found


def _changed(file: Path) -> list[str]:
    from modelexport.files.linked_weights import changed_files
    from modelexport.tagged.file import read_tagged

    return changed_files(read_tagged(file, checked=False).model)


def nodes(file: FileOrFolderArgument, modules: SelectorsArgument, as_json: JsonOption = False) -> None:
    """List the nodes of module calls and of the calls inside them, in each part that runs them."""
    from modelexport.cli import show_export
    from modelexport.tagged.file import read_tagged
    from modelexport.tagged.package import parts_with

    listed = {}
    for name, part in parts_with(file, *modules).items():
        tagged = read_tagged(part)
        listed[name] = tagged.describe_nodes(tagged.select(*modules))
    print_parts(listed, show_export.format_nodes, as_json=as_json)


def compare(
    first: Annotated[Path, typer.Argument(metavar="A.onnx|A/", help="An ONNX file, tagged or not, or a package.")],
    second: Annotated[Path, typer.Argument(metavar="B.onnx|B/", help="The file or package to compare with.")],
    selectors: Annotated[
        list[str] | None, typer.Argument(metavar="[SELECTOR]...", help="Only these calls and those inside them.")
    ] = None,
    values: Annotated[
        bool, typer.Option("--values", help="Compare the elements of parameters; reads all weights.")
    ] = False,
    fail_on: Annotated[
        str,
        typer.Option("--fail-on", metavar="ASPECTS", help="Exit status 1 if structure,weights,outputs,cost differ."),
    ] = "",
    inputs: Annotated[
        Path | None,
        typer.Option("--inputs", metavar="FILE", help="Inputs for comparing outputs: .npz, .safetensors, or JSON."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown summary.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show how two files differ, module by module. The exit status is 0 even if they do, except with --fail-on."""
    from modelexport.cli import show_comparison
    from modelexport.measure.changes import ASPECTS, check_changes

    asked = [aspect.strip() for aspect in fail_on.split(",") if aspect.strip()]
    aspects = [aspect for aspect in ASPECTS if aspect in asked]
    if unknown := sorted(set(asked) - set(ASPECTS)):
        near = nearest(unknown[0], ASPECTS)
        raise UsageError(f"--fail-on takes {', '.join(ASPECTS)}, not {', '.join(unknown)}{near}")
    if markdown and as_json:
        raise UsageError("give --markdown or --json, not both")
    one, other = named_files(first), named_files(second)
    if one.keys() != other.keys():
        names = [", ".join(files).strip() or "one file" for files in (one, other)]
        raise UsageError(f"{first} and {second} have different parts: {names[0]}, and {names[1]}; compare two files")
    reports = {
        name: check_changes(one[name], other[name], aspects, values=values, modules=selectors or (), inputs=inputs)
        for name in one
    }
    if as_json:
        documents = {name: show_comparison.changes_document(report) for name, report in reports.items()}
        print_json({"parts": documents} if first.is_dir() else documents[""])
    else:
        show = show_comparison.format_markdown if markdown else show_comparison.format_changes
        print(format_headings({name: show(report) for name, report in reports.items()}))
    if any(report.failed for report in reports.values()):
        raise typer.Exit(1)

"""What only reads tagged files: `tree`, `nodes`, `compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modelexport.cli.options import FileArgument, JsonOption, SelectorsArgument
from modelexport.cli.running import print_json
from modelexport.errors import UsageError


def tree(
    file: FileArgument,
    depth: Annotated[int | None, typer.Option(metavar="N", help="Show N levels below the root.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Also look whether the files that hold its weights are as they were.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the module tree in FILE, with the nodes of each call."""
    from modelexport.cli import show_export
    from modelexport.tagged.skim import skim
    from modelexport.tagged.tree import tree_rows, untagged_operators

    found = skim(file)
    if found is None:
        from modelexport.tagged.file import read_tagged

        found = read_tagged(file).skimmed
    untagged = untagged_operators(found.nodes)
    rows = tree_rows(found.nodes, found.calls, found.tags.__getitem__)
    shown = [row for row in rows if depth is None or row.depth <= depth]
    faults: list[str] = []
    if check:
        from modelexport.files.linked import changed_files
        from modelexport.tagged.file import read_tagged

        faults = changed_files(file, read_tagged(file, checked=False).model)
    if as_json:
        checked = {"weights": faults} if check else {}
        document = {"path": str(file), "coverage": found.coverage, "tree": shown, "untagged": untagged}
        print_json(document | checked)
    else:
        show_export.print_tree(shown, found.coverage, untagged)
        for fault in faults:
            print(fault)
    if faults:
        raise typer.Exit(1)


def nodes(
    file: FileArgument,
    modules: SelectorsArgument,
    as_json: JsonOption = False,
) -> None:
    """List the nodes of module calls and of the calls inside them."""
    from modelexport.cli import show_export
    from modelexport.tagged.file import read_tagged

    tagged = read_tagged(file)
    listed = tagged.describe_nodes(tagged.select(*modules))
    if as_json:
        print_json(listed)
    else:
        show_export.print_nodes(listed)


def compare(
    first: Annotated[Path, typer.Argument(metavar="A.onnx", help="An ONNX file, tagged or not.")],
    second: Annotated[Path, typer.Argument(metavar="B.onnx", help="Another one.")],
    selectors: Annotated[
        list[str] | None, typer.Argument(metavar="[SELECTOR]...", help="Only these calls and those inside them.")
    ] = None,
    values: Annotated[bool, typer.Option("--values", help="Compare the elements of parameters: reads all.")] = False,
    fail_on: Annotated[
        str,
        typer.Option("--fail-on", metavar="ASPECTS", help="Status 1 if structure,weights,outputs,cost differ."),
    ] = "",
    inputs: Annotated[
        Path | None, typer.Option("--inputs", metavar="FILE", help="Arrays for outputs: .npz, .safetensors, or JSON.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown summary.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show how two files differ, module by module; status 0 also where they do, unless --fail-on says otherwise."""
    from modelexport.cli import show_comparison
    from modelexport.verify.changes import ASPECTS, check_changes

    asked = [aspect.strip() for aspect in fail_on.split(",") if aspect.strip()]
    aspects = [aspect for aspect in ASPECTS if aspect in asked]
    if unknown := sorted(set(asked) - set(ASPECTS)):
        raise UsageError(f"--fail-on takes {', '.join(ASPECTS)}, not {', '.join(unknown)}")
    if markdown and as_json:
        raise UsageError("give --markdown or --json, not both")
    report = check_changes(first, second, aspects, values=values, modules=selectors or (), inputs=inputs)
    if as_json:
        print_json(show_comparison.changes_document(report))
    elif markdown:
        print(show_comparison.format_markdown(report))
    else:
        print(show_comparison.format_changes(report))
    if report.failed:
        raise typer.Exit(1)

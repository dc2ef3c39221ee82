"""What only reads tagged files: `tree`, `nodes`, `compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelexport.cli.options import FileOrFolderArgument, JsonOption
from modelexport.cli.running import named_files, print_json
from modelexport.errors import UsageError

if TYPE_CHECKING:
    from modelexport.tagged.skim import Skimmed


def tree(
    file: FileOrFolderArgument,
    depth: Annotated[int | None, typer.Option(metavar="N", help="Show N levels below the root.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Also look whether the files that hold its weights are as they were.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the module tree in FILE, or in each part of FOLDER, with the nodes of each call."""
    from modelexport.cli.show_package import format_headings
    from modelexport.tagged.tree import format_tree, tree_rows, untagged_operators

    documents: dict[str, dict[str, Any]] = {}
    texts: dict[str, str] = {}
    faults: list[str] = []
    for name, part in named_files(file).items():
        found = _skimmed(part)
        untagged = untagged_operators(found.nodes)
        rows = tree_rows(found.nodes, found.calls, found.tags.__getitem__)
        shown = [row for row in rows if depth is None or row.depth <= depth]
        own = _changed(part) if check else []
        faults += own
        documents[name] = {"path": str(part), "coverage": found.coverage, "tree": shown, "untagged": untagged}
        documents[name] |= {"weights": own} if check else {}
        texts[name] = format_tree(shown, found.coverage, untagged)
    if as_json:
        print_json({"parts": documents} if file.is_dir() else documents[""])
    else:
        print(format_headings(texts))
        for fault in dict.fromkeys(faults):
            print(fault)
    if faults:
        raise typer.Exit(1)


def _skimmed(file: Path) -> Skimmed:
    from modelexport.tagged.file import read_tagged
    from modelexport.tagged.skim import skim

    return skim(file) or read_tagged(file).skimmed


def _changed(file: Path) -> list[str]:
    from modelexport.files.linked import changed_files
    from modelexport.tagged.file import read_tagged

    return changed_files(file, read_tagged(file).model)


def nodes(
    file: FileOrFolderArgument,
    module: Annotated[str, typer.Argument(metavar="ADDRESS|TAG", help="A call: . is the root, path@1 a second call.")],
    as_json: JsonOption = False,
) -> None:
    """List the nodes of a module call and of the calls inside it, in each part that runs it."""
    from modelexport.cli import show_export
    from modelexport.cli.show_package import format_headings
    from modelexport.tagged.file import read_tagged
    from modelexport.tagged.package import parts_with

    listed = {}
    for name, part in parts_with(file, module).items():
        tagged = read_tagged(part)
        listed[name] = tagged.describe_nodes(tagged.find(module))
    if as_json:
        print_json({"parts": listed} if file.is_dir() else listed[""])
    else:
        print(format_headings({name: show_export.format_nodes(rows) for name, rows in listed.items()}))


def compare(
    first: Annotated[Path, typer.Argument(metavar="A.onnx|A/", help="A tagged ONNX file, or a package.")],
    second: Annotated[Path, typer.Argument(metavar="B.onnx|B/", help="Another one.")],
    values: Annotated[bool, typer.Option("--values", help="Compare the elements of parameters: reads all.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show how two tagged files, or the parts of two packages, differ, by module; status 0 also where they do."""
    from modelexport.cli.show_comparison import format_comparison
    from modelexport.cli.show_package import format_headings
    from modelexport.tagged.comparison import compare as run

    one, other = named_files(first), named_files(second)
    if one.keys() != other.keys():
        raise UsageError(
            f"{first} and {second} have different parts: {', '.join(one) or 'one file'}, and "
            f"{', '.join(other) or 'one file'}; compare two files"
        )
    comparisons = {name: run(one[name], other[name], values=values) for name in one}
    if as_json:
        print_json({"parts": comparisons} if first.is_dir() else comparisons[""])
    else:
        print(format_headings({name: format_comparison(comparison) for name, comparison in comparisons.items()}))

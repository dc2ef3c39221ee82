"""`compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from modelexport.core.declared_options import argument, option
from modelexport.core.text import suggest
from modelexport.errors import UsageError
from modelexport.terminal.printing import document_of_parts, format_headings, print_result
from modelexport.terminal.shared_options import JSON


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
    from modelexport.tagged.package import files_of
    from modelexport.tools.compare import comparison_text as show_comparison
    from modelexport.tools.compare.change_checks import ASPECTS, check_changes

    asked = [aspect.strip() for aspect in fail_on.split(",") if aspect.strip()]
    aspects = [aspect for aspect in ASPECTS if aspect in asked]
    if unknown := sorted(set(asked) - set(ASPECTS)):
        near = suggest(unknown[0], ASPECTS)
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

"""`compare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from modelexport.core.declared_options import argument, option
from modelexport.core.text import suggest
from modelexport.errors import UsageError
from modelexport.runtime import CPU
from modelexport.terminal.printing import document_of_parts, format_headings, print_result
from modelexport.terminal.shared_options import JSON, CalibrationData


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Structure"""

    values: bool = option(False, "Compare the elements of parameters; reads all weights.")
    fail_on: str = option("", "Exit status 1 if structure,weights,outputs,cost differ.", metavar="ASPECTS")
    inputs: Path | None = option(
        None, "Inputs for comparing outputs: .npz, .safetensors, or JSON.", metavar="FILE", file="read"
    )
    markdown: bool = option(False, "Print a Markdown summary.")


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Numbers by module: each of these options runs both files"""

    numbers: bool = option(
        False,
        "Show how far off the results of B's modules are, instead of the structure; exit status 1 if they differ.",
    )
    bound: float | None = option(
        None, "The largest error of outputs that agree, as a share of their size [the bound of B's recipe].",
        metavar="SHARE",
    )  # fmt: skip
    provider: str | None = option(
        None,
        f"The device to run on: NAME[,option=value...]; see `modelexport devices` [{CPU}].",
        flag="--device --provider",
        metavar="NAME",
    )
    seed: int | None = option(None, "The seed of random inputs [0].", metavar="N", least=0)
    as_csv: bool = option(False, "Print a table of cost and error of each call as CSV.", flag="--csv")
    html: Path | None = option(
        None, "Also write a page with the error of each call.", metavar="OUT.html", file="written alone"
    )


def compare(
    first: Path = argument(..., "An ONNX file, tagged or not, or a package.", metavar="A.onnx|A/", file="read"),
    second: Path = argument(..., "The file or package to compare with.", metavar="B.onnx|B/", file="read"),
    selectors: Sequence[str] = argument((), "Only these calls and those inside them.", metavar="[SELECTOR]..."),
    as_json: bool = JSON,
    *,
    structure: Structure,
    running: Numbers,
    measured: CalibrationData,
) -> None:
    """Show how two files differ, module by module: their structure, or their numbers. The exit status is 0 even if the
    structure differs, except with --fail-on.
    """
    from modelexport.tools.compare import comparison_text as show_comparison
    from modelexport.tools.compare.change_checks import ASPECTS, check_changes

    if running != Numbers() or measured != CalibrationData():
        if structure != Structure():
            raise UsageError("--values, --fail-on, --inputs and --markdown go without --numbers, --bound and --data")
        compare_numbers(first, second, selectors, running, measured, as_json=as_json)
        return
    asked = [aspect.strip() for aspect in structure.fail_on.split(",") if aspect.strip()]
    aspects = [aspect for aspect in ASPECTS if aspect in asked]
    if unknown := sorted(set(asked) - set(ASPECTS)):
        near = suggest(unknown[0], ASPECTS)
        raise UsageError(f"--fail-on takes {', '.join(ASPECTS)}, not {', '.join(unknown)}{near}")
    if structure.markdown and as_json:
        raise UsageError("give --markdown or --json, not both")
    reports = {
        name: check_changes(*files, aspects, values=structure.values, modules=selectors, inputs=structure.inputs)
        for name, files in _same_parts(first, second).items()
    }
    documents = {name: report.document for name, report in reports.items()}
    show = show_comparison.format_markdown if structure.markdown else show_comparison.format_changes
    text = format_headings({name: show(report) for name, report in reports.items()})
    print_result(document_of_parts(documents), lambda: text, as_json=as_json)
    if any(report.failed for report in reports.values()):
        raise typer.Exit(1)


def compare_numbers(
    first: Path, second: Path, modules: Sequence[str], running: Numbers, measured: CalibrationData, *, as_json: bool
) -> None:
    """Run both files on the same inputs, and show what each module of the second loses."""
    if running.as_csv and as_json:
        raise UsageError("give --csv or --json, not both")
    folders = [path for path in (first, second) if path.is_dir()]
    if folders and (running.as_csv or running.html is not None):
        raise UsageError(f"{folders[0]} is a folder: --csv and --html go with a file")
    reports, texts = _numbers(first, second, modules, running, measured)
    if running.html is not None or running.as_csv:
        from modelexport.tables.costs import cost
        from modelexport.terminal.show_table import show_errors

        report = reports[""]
        show_errors(cost(first), report.errors, running.html, [report.section(second.name)], as_csv=running.as_csv)
    if not running.as_csv:
        documents = {name: report.document for name, report in reports.items()}
        print_result(document_of_parts(documents), lambda: format_headings(texts), as_json=as_json)
    if not all(report.agrees for report in reports.values()):
        raise typer.Exit(1)


def compare_as_verify(
    file: Path, other: Path, modules: Sequence[str], measured: CalibrationData, *, as_json: bool, **running: Any
) -> None:
    """``verify FILE --against OTHER``, the earlier spelling, with fields of :class:`Numbers`."""
    compare_numbers(file, other, modules, Numbers(**running), measured, as_json=as_json)


def _numbers(
    first: Path, second: Path, modules: Sequence[str], running: Numbers, measured: CalibrationData
) -> tuple[dict[str, Any], dict[str, str]]:
    """The report of each part, and its text."""
    how: dict[str, Any] = {"provider": running.provider or CPU, "seed": running.seed or 0}
    if first.is_dir() != second.is_dir():  # the stages of a file
        from modelexport.packages.stage_runs import verify_stages
        from modelexport.terminal.show_verification import format_chain

        if modules or running.bound is not None or measured.data is not None:
            raise UsageError("modules, --bound and --data go with two files, not with stages")
        stages = verify_stages(*((first, second) if first.is_dir() else (second, first)), **how)
        return {"": stages}, {"": format_chain(stages.outputs)}
    from modelexport.tools.compare.against_file import verify_against
    from modelexport.tools.compare.loss_text import format_losses

    how |= {"modules": modules, "bound": running.bound}
    how |= {"data": measured.data, "processor": measured.processor}
    reports = {name: verify_against(*files, **how) for name, files in _same_parts(first, second).items()}
    return dict(reports), {name: format_losses(report) for name, report in reports.items()}


def _same_parts(first: Path, second: Path) -> dict[str, tuple[Path, Path]]:
    """Two files under an empty name, or the files of two packages by the names of their parts."""
    from modelexport.tagged.package import files_of

    files = [files_of(path) for path in (first, second)]
    if files[0].keys() != files[1].keys():
        names = [", ".join(each).strip() or "one file" for each in files]
        raise UsageError(f"{first} and {second} have different parts: {names[0]}, and {names[1]}; compare two files")
    return {name: (file, files[1][name]) for name, file in files[0].items()}

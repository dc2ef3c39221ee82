"""Packages as text: what was written, and whether it generates what the model does. ``format_*`` returns it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport.cli.printing import command_line
from modelexport.cli.show_export import export_document, format_fusion, format_interface
from modelexport.cli.show_verification import format_parameters, format_verification
from modelexport.core.text import align, bytes_text, plural

if TYPE_CHECKING:
    from modelexport.packages.package_export import PackageResult
    from modelexport.packages.verify_by_generation import GenerationReport, GenerationRun
    from modelexport.packages.verify_by_pipeline import PipelineReport


def format_package(result: PackageResult, model: str, page: Path | None = None) -> str:
    """A line for each part, its inputs and outputs, then the weights, notes, the time, and what to do next.

    Args:
        page: The page of `export --report`, if it was written.
    """
    rows: list[tuple[object, ...]] = [("PART", "FILE", "NODES", "EXACT", "DERIVED", "INFERRED", "CHECKED")]
    for part in result.manifest.parts:
        export = result.parts[part.name]
        coverage = export.coverage
        nodes = coverage.exact + coverage.derived + coverage.inferred
        checked: str = "" if export.check is None else export.check.status
        if export.verified is not None:
            checked = export.verified.verdict
        rows.append((part.name, part.file, nodes, coverage.exact, coverage.derived, coverage.inferred, checked))
    size = f"{bytes_text(result.weight_bytes)} on disk, once for all parts"
    weights = f"weights: {', '.join(result.manifest.weights)}, {size}"
    fused = [
        f"{name}: {line}"
        for name, part in result.parts.items()
        if part.fusion is not None
        for line in format_fusion(part.fusion)
    ]
    interfaces = [
        line for name, part in result.parts.items() for line in (f"{name}:", *format_interface(part.hierarchy))
    ]
    verifications = [
        f"{name}: {format_verification(part.verified)}"
        for name, part in result.parts.items()
        if part.verified is not None
    ]
    took = f"{result.folder}: {sum(result.seconds.values()):,.1f} s"
    shown = command_line("report", result.folder, "-o", result.folder / "report.html")
    of_model = ("tree", result.folder) if verifications else ("verify", result.folder, "--model", model)
    first = command_line(*of_model)
    steps = [first, shown if page is None else f"open {page} in a browser"]
    return "\n".join(
        [align(rows), *interfaces, weights, *fused, *verifications, *result.notes, took, f"next: {'; '.join(steps)}"]
    )


def format_generation(report: GenerationReport) -> str:
    """A line for each run, with its first difference if there is one, and a summary line."""
    rows: list[tuple[object, ...]] = [("RUN", "PROMPTS", "STEPS", "TOKENS", "LARGEST DIFFERENCE", "")]
    for run in report.runs:
        tokens = "equal" if run.first_wrong_token is None else "differ"
        difference = "" if run.agrees else _first_wrong_steps(run)
        rows.append((run.name, ",".join(map(str, run.prompts)), run.steps, tokens, f"{run.largest:.1e}", difference))
    equal = sum(run.agrees for run in report.runs)
    summary = f"{equal} of {plural(len(report.runs), 'run')} generate what PyTorch generates"
    return "\n".join([align(rows, right={4}), "; ".join([summary, *format_parameters(report.parameters)])])


def _first_wrong_steps(run: GenerationRun) -> str:
    steps = [
        f"{what} from step {step}"
        for what, step in (("logits", run.first_wrong_logits), ("tokens", run.first_wrong_token))
        if step is not None
    ]
    where = f", first in {run.module}" if run.module is not None else ""
    return f"{' and '.join(steps)} of {run.part}{where} ({run.reason})"


def format_pipeline(report: PipelineReport) -> str:
    """A line for each call of a part, one for each result, and a summary line."""
    rows: list[tuple[object, ...]] = [("PART", "CALL", "STATUS", "BY ITSELF", "END TO END", "")]
    for call in report.calls:
        through = "" if call.end_to_end is None else f"{call.end_to_end:.1e}"
        difference = f"{f'first in {call.module}: ' if call.module else ''}{call.reason}"
        rows.append((call.part, call.index, call.status, f"{call.relative:.1e}", through, difference))
    rows += [
        (output.name, "", output.status, "", f"{output.relative or 0.0:.1e}", output.reason)
        for output in report.results
    ]
    equal = sum(call.status == "agree" for call in report.calls)
    summary = f"{equal} of {plural(len(report.calls), 'call')} return what PyTorch returns"
    facts = [summary, *format_parameters(report.parameters)]
    if report.in_pytorch:
        facts.append(f"{', '.join(report.in_pytorch)} ran in PyTorch")
    legend = (
        "BY ITSELF: error of one call on PyTorch's inputs, as a share of what it returns; END TO END: with the errors "
        "of all calls before it"
    )
    return "\n".join([align(rows, right={1, 3, 4}), legend, "; ".join(facts)])


def package_document(result: PackageResult) -> dict[str, Any]:
    """The document that ``modelexport export -o FOLDER/ --json`` prints."""
    return {
        "folder": str(result.folder),
        "manifest": result.manifest,
        "parts": {name: export_document(part) for name, part in result.parts.items()},
        "seconds": result.seconds,
        "notes": list(result.notes),
        "files": [str(file) for file in result.files],
        "graph_bytes": result.graph_bytes,
        "weight_bytes": result.weight_bytes,
    }

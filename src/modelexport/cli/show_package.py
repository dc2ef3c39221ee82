"""Packages as text: what was written. ``format_*`` returns it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport.cli.show_export import export_document, format_fusion, format_interface
from modelexport.core.owners import Evidence
from modelexport.core.text import align, bytes_text
from modelexport.terminal.printing import command_line, next_steps
from modelexport.terminal.show_verification import format_verification

if TYPE_CHECKING:
    from modelexport.packages.package_export import PackageResult


def format_package(result: PackageResult, model: str, page: Path | None = None) -> str:
    """A line for each part, its inputs and outputs, then the weights, notes, the time, and what to do next.

    Args:
        page: The page of `export --report`, if it was written.
    """
    rows: list[tuple[object, ...]] = [("PART", "FILE", "NODES", *(kind.name for kind in Evidence), "CHECKED")]
    for part in result.manifest.parts:
        export = result.parts[part.name]
        coverage = export.coverage
        checked: str = "" if export.check is None else export.check.status
        if export.verified is not None:
            checked = export.verified.verdict
        counts = (getattr(coverage, kind) for kind in Evidence)
        rows.append((part.name, part.file, coverage.tagged, *counts, checked))
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
    of_parts = [f"{name}: {line}" for name, part in result.parts.items() for line in (*part.notes, *part.limits)]
    took = f"{result.folder}: {sum(result.seconds.values()):,.1f} s"
    shown = command_line("report", result.folder, "-o", result.folder / "report.html")
    of_model = ("tree", result.folder) if verifications else ("verify", result.folder, "--model", model)
    steps = next_steps(command_line(*of_model), shown if page is None else f"open {page} in a browser")
    told = [*fused, *verifications, *of_parts, *result.notes]
    return "\n".join([align(rows), *interfaces, weights, *told, took, steps])


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

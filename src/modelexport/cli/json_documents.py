"""The JSON documents that commands print with ``--json``, if they are not the result itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelexport.exporting.result import ExportResult
    from modelexport.lineage.adoption import Adopted
    from modelexport.packages.packaging import PackageResult


def export_document(result: ExportResult) -> dict[str, Any]:
    """The document that ``modelexport export --json`` prints."""
    document: dict[str, Any] = {
        "path": str(result.path),
        "files": [str(file) for file in result.files],
        "model": result.hierarchy.model,
        "frontend": result.hierarchy.settings.frontend,
        "coverage": result.coverage,
        "seconds": result.seconds,
        "messages": result.messages,
        "tree": result.tree,
    }
    if result.unrepeatable:
        document["unrepeatable"] = result.unrepeatable
    if result.fusion is not None:
        document["fusion"] = result.fusion
    if result.weights.is_apart:
        document["weights"] = result.weights
    if result.check is not None:
        document["check"] = result.check
    if result.attempts:
        document["attempts"] = [{"frontend": one.frontend, "reason": one.reason} for one in result.attempts]
    if result.verified is not None:
        document["verify"] = {
            "verdict": result.verified.verdict,
            "agrees": result.verified.agrees,
            "largest_difference": result.verified.largest,
            "outputs": result.verified.outputs,
            "calls": result.verified.counts,
            "parameters": result.verified.parameters,
        }
    return document


def adopted_document(adopted: Adopted) -> dict[str, Any]:
    """The document that ``modelexport adopt --json`` prints."""
    return {
        "path": str(adopted.path),
        "files": adopted.files,
        "coverage": adopted.coverage,
        "sources": adopted.sources,
        "untagged": adopted.untagged,
        "repeated": adopted.repeated,
        "tree": adopted.tree,
    }


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

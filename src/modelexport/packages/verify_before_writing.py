"""Runs a package before it is written, and compares it with what its library computes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from modelexport.core.text import error_line
from modelexport.errors import CheckError, ModelExportError
from modelexport.exporting.export_result import ExportResult
from modelexport.format.package_manifest import Manifest
from modelexport.packages.model_parts import with_weights
from modelexport.packages.package_kinds import PackageKind, Request

_NOT_RUN = ("loading", "running")
"""The steps of a check that show that a part does not run here."""


def check_package(
    kind: PackageKind, request: Request, manifest: Manifest, folder: Path, results: Mapping[str, ExportResult]
) -> list[str]:
    """Run the parts on other batches than that of the export, and compare with the library, if its kind can.

    Args:
        results: The export of each part. Where one was not to be checked, or has no weights here, nothing is run.

    Returns:
        Notes, a line each.

    Raises:
        CheckError: The package computes something else, and is not kept anyway.
    """
    if not kind.does:
        return []
    notes: list[str] = []
    checks = {name: result.check for name, result in results.items()}
    fault = next((f"{name}: {check.reason}" for name, check in checks.items() if check and check.step in _NOT_RUN), "")
    problem = f"the package cannot run {kind.example} here"
    if not fault:
        if any(check is None or check.status != "passed" for check in checks.values()):
            return []
        problem = f"the package does not {kind.does} what the model does"
        uncalled = [{check.path for check in each.hierarchy.modules if not check.calls} for each in results.values()]
        try:
            with with_weights(request.model, request.options.weights.lent, set[str].intersection(*uncalled)):
                fault = kind.find_fault(request, manifest, folder, notes)
        except ModelExportError as error:
            fault = error_line(error)
    if not fault:
        return notes
    if request.options.checks.keep_anyway:
        return [*notes, f"{problem}: {fault}"]
    raise CheckError(
        f"{problem}, and was not written: {fault}; --keep-anyway (keep_anyway=True) writes it nevertheless",
        reason=fault,
    )

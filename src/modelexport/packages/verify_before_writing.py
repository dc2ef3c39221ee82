"""Runs a package before it is written, and compares it with what its library computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from modelexport.core.text import error_line
from modelexport.errors import CheckError, ModelExportError
from modelexport.exporting.export_result import ExportResult
from modelexport.exporting.options import Options
from modelexport.format.package_manifest import Manifest
from modelexport.packages.model_parts import with_weights
from modelexport.packages.sentence_pipelines import SentencePipeline
from modelexport.packages.verify_by_encoding import encoding_fault
from modelexport.packages.verify_by_generation import generation_fault

_NOT_RUN = ("loading", "running")
"""The steps of a check that show that a part does not run here."""


def check_package(
    model: nn.Module,
    manifest: Manifest,
    folder: Path,
    directory: Path | None,
    results: Mapping[str, ExportResult],
    given: Mapping[str, Any] | None,
    options: Options,
) -> list[str]:
    """Generate tokens or embed texts in other batches than that of the export, and compare with the library.

    Args:
        folder: Has the files of the package.
        directory: The folder of the model.
        results: The export of each part. Where one was not to be checked, or has no weights here, nothing is run.
        given: Inputs of the caller.

    Returns:
        Notes, a line each.

    Raises:
        CheckError: The package does not run, or computes something else.
    """
    notes: list[str] = []
    find: Callable[[], str]
    if manifest.generation is not None:
        does, kind = "generate", "a prompt"
        find = lambda: generation_fault(model, manifest, folder, given)  # noqa: E731
    elif isinstance(model, SentencePipeline):
        does, kind = "compute", "a text"
        find = lambda: encoding_fault(model, folder / manifest.parts[0].file, directory, notes)  # noqa: E731
    else:
        return []
    checks = {name: result.check for name, result in results.items()}
    fault = next((f"{name}: {one.reason}" for name, one in checks.items() if one and one.step in _NOT_RUN), "")
    told = f"the package cannot run {kind} here"
    if not fault:
        if any(one is None or one.status != "passed" for one in checks.values()):
            return []
        told = f"the package does not {does} what the model does"
        uncalled = [{one.path for one in each.hierarchy.modules if not one.calls} for each in results.values()]
        try:
            with with_weights(model, options.weights.lent, set[str].intersection(*uncalled)):
                fault = find()
        except ModelExportError as error:
            fault = error_line(error)
    if not fault:
        return notes
    if options.checks.keep_anyway:
        return [*notes, f"{told}: {fault}"]
    raise CheckError(
        f"{told}, and was not written: {fault}; --keep-anyway (keep_anyway=True) writes it nevertheless", reason=fault
    )

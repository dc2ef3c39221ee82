"""What an export checks before its files are moved into place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport.core.stages import Stages
from modelexport.exporting.options import Options
from modelexport.format import documents
from modelexport.tagged.flattening import runnable
from modelexport.verify.verdicts import VerifyReport

if TYPE_CHECKING:
    from torch import nn


def run_checks(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
    path: Path,
    hierarchy: documents.Hierarchy,
    options: Options,
    stages: Stages,
) -> VerifyReport | None:
    """Verify a file that was just written and keep its reference values, as far as the options ask for it.

    Returns:
        The verification; ``None`` if it was not asked for.
    """
    from modelexport.verify.model import record_reference, verify  # nothing else of an export needs ONNX Runtime

    verified = None
    kept, source = options.checks.reference, options.weights.source
    if options.checks.verify:
        with stages("verify"), runnable(path, options.tags.tags_as) as file:
            verified = verify(model, inputs, file, sidecar=hierarchy, weights=source)
    if kept:
        with stages("reference values"):
            record_reference(
                model,
                inputs,
                path,
                modules=() if isinstance(kept, bool) else kept,
                sidecar=hierarchy,
                announce=lambda size: stages.tell(f"reference values, {size / 1e6:,.1f} MB"),
                weights=source,
            )
    return verified

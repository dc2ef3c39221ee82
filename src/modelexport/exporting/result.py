"""What an export made and how it went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from modelexport.capture.choice import Attempt
from modelexport.exporting.checks import FileCheck
from modelexport.format import documents
from modelexport.tagged.encodings.functions import FunctionsModel
from modelexport.tagged.tree import TreeRow
from modelexport.weights.placement import WeightsSummary

if TYPE_CHECKING:
    from modelexport.pytorch.repeatability import Unrepeatable
    from modelexport.verify.verdicts import VerifyReport


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """What an export made and how it went."""

    path: Path
    hierarchy: documents.Hierarchy
    tree: Sequence[TreeRow]
    """Every call with its nodes."""
    seconds: Mapping[str, float]
    """Stage to wall time."""
    verified: VerifyReport | None
    """The comparison with PyTorch; ``None`` if it was not asked for."""

    files: Sequence[Path]
    """Every file that was written; of the DAG files the folder."""

    check: FileCheck | None = None
    """What the check of the file gave; ``None`` if it was not asked for."""

    attempts: Sequence[Attempt] = ()
    """The front ends that were tried first, and why their files were not taken."""

    functions: FunctionsModel | None = None
    """With the `functions` encoding: the model as written, and the calls that could not become functions."""

    weights: WeightsSummary = field(default_factory=WeightsSummary)
    """Where the weights are."""

    notes: Sequence[str] = ()
    """What of the example inputs was left out, added or kept before the capture."""

    messages: Sequence[str] = ()
    """What PyTorch's exporter and the optimiser warned of."""

    unrepeatable: Sequence[Unrepeatable] = ()
    """What of the model is not the same in every run, which a file cannot be."""

    @property
    def coverage(self) -> documents.Coverage:
        """How many nodes are known by which evidence."""
        return self.hierarchy.coverage

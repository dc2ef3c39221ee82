"""The result of an export."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport.core.result_display import Rows, Written
from modelexport.core.text import first_few, plural
from modelexport.exporting.fixed_axes import FixedAxis
from modelexport.exporting.front_end_choice import Attempt
from modelexport.exporting.output_checks import FileCheck
from modelexport.exporting.runtime_fusion import Fusion
from modelexport.format import documents
from modelexport.graph.size_conditions import SizeCondition, conditions_in_words, stated_with_line
from modelexport.tagged.encodings.functions import FunctionsModel
from modelexport.tagged.tree_display import TreeRow
from modelexport.weights.linked_copied_embedded import WeightsSummary

if TYPE_CHECKING:
    from modelexport.pytorch.runs.repeatability import Unrepeatable
    from modelexport.runtime.sessions import Session
    from modelexport.verify.verify_report import VerifyReport


@dataclass(frozen=True, kw_only=True)
class ExportResult(Written):
    """The files and facts that an export produced."""

    path: Path
    hierarchy: documents.Hierarchy
    tree: Sequence[TreeRow]
    """Every call with its nodes."""
    seconds: Mapping[str, float]
    """Stage to wall time."""
    verified: VerifyReport | None
    """The comparison with PyTorch; ``None`` if it was not requested."""

    files: Sequence[Path]
    """Every file that was written; for the DAG files their folder."""

    check: FileCheck | None = None
    """The result of the check of the file; ``None`` if it was not requested."""

    attempts: Sequence[Attempt] = ()
    """The front ends that were tried first, and why they failed."""

    functions: FunctionsModel | None = None
    """With the `functions` encoding: the written model, and the calls that could not become functions."""

    weights: WeightsSummary = field(default_factory=WeightsSummary)
    """The places of the weights."""

    fusion: Fusion | None = None
    """Which operators of ONNX Runtime are where; ``None`` if nothing was fused."""

    notes: Sequence[str] = ()
    """What of the example inputs was left out, added or kept before the capture, and what else a caller has to know."""

    added: Mapping[str, Any] = field(default_factory=dict)
    """The inputs of the file that nobody gave, because transformers' exporter computes them ahead, for the example."""

    remarks: Sequence[str] = ()
    """What the caller of the export said about the model and its inputs."""

    messages: Sequence[str] = ()
    """The warnings of PyTorch's exporter and of the optimizer."""

    unrepeatable: Sequence[Unrepeatable] = ()
    """Behavior of the model that changes from run to run, which a file cannot reproduce."""

    fixed: Sequence[FixedAxis] = ()
    """Axes that were to be dynamic and have the size of the example inputs, since the file is wrong with any other."""

    tried_other_sizes: bool = False
    """Whether the file was compared with the model at other sizes than those of the example."""

    def __repr__(self) -> str:
        counts = self.coverage
        facts = [
            plural(len(self.tree), "call"),
            f"{counts.tagged:,} nodes ({counts.exact:,} exact)",
            *([f"check {self.check.status}"] if self.check is not None else []),
            *([f"verified: {self.verified.verdict}"] if self.verified is not None else []),
            *([conditions_in_words(self.valid_if)] if self.valid_if else []),
            *([f"presumed at {first_few(presumed, 2)}"] if (presumed := self.hierarchy.settings.presumed) else []),
            plural(len(self.files), "file"),
        ]
        return f"<ExportResult {self.path}: {', '.join(facts)}>"

    def _table(self) -> Rows:
        yield "call", "tag", "nodes", "own operators"
        for row in self.tree:
            if row.nodes:
                yield row.address or ".", row.tag, row.nodes, ", ".join(row.own)

    def session(self, **options: Any) -> Session:
        """The file in ONNX Runtime: see :func:`modelexport.runtime.sessions.open_session`."""
        from modelexport.runtime.sessions import open_session

        return open_session(self.path, **options)

    @property
    def valid_if(self) -> Sequence[documents.ValidIf]:
        """The conditions of sizes under which the file is right, with the lines of the model that they come from."""
        return self.hierarchy.settings.valid_if

    @property
    def limits(self) -> list[str]:
        """What a person has to know before the file runs with other inputs, or once more, a line each."""
        lines = [f"{item.kind}: {item.where}; {item.instead}" for item in self.unrepeatable]
        lines += [
            f"axis {axis.axis} of {axis.input} is not dynamic, it is {axis.size}: "
            f"{axis.call or 'the model itself'} fixes it ({axis.reason})"
            for axis in self.fixed
        ]
        if self.valid_if:
            unchecked = self.check is None or self.check.status == "skipped"
            untried = unchecked and not self.tried_other_sizes
            tried = "; no other sizes were tried, since the file was not checked" if untried else ""
            lines.append(f"the file is right only for {'; '.join(map(stated_with_line, self.valid_if))}{tried}")
        if presumed := self.hierarchy.settings.presumed:
            lines.append(presumption_warning(presumed))
        return lines

    @property
    def coverage(self) -> documents.Coverage:
        """How many nodes have an owner by each kind of evidence."""
        return self.hierarchy.coverage


def presumption(lines: Sequence[str]) -> str:
    """What a file does where the model asks whether anything is selected."""
    asked = f"the model asks whether anything is selected ({first_few(lines, 3)})"
    return f"{asked}; the file always does what follows if something is"


def presumption_warning(lines: Sequence[str]) -> str:
    """The same, and what to do about a file that passed its check."""
    return f"{presumption(lines)}: verify it on inputs for which nothing is"


def notes_on_numbers(recorded: Iterable[SizeCondition], stated: Iterable[documents.ValidIf]) -> Iterator[str]:
    """What is not known of a file whose model makes plain numbers of sizes, a line for each line of its code.

    Args:
        recorded: The conditions of its dynamic axes.
        stated: Those that the file states.
    """
    axes: dict[str, dict[str, None]] = {}
    formulas = {condition.formula for condition in stated}
    for condition in recorded:
        if condition.makes_number and condition.formula not in formulas:
            line = f"{condition.where}: `{condition.source}`"
            axes.setdefault(line, {}).update(dict.fromkeys(condition.symbols))
    for line, symbols in axes.items():
        yield (
            f"the model needs sizes as plain numbers ({', '.join(symbols)}; {line}): what it decides by them from "
            "there on is not recorded, and was tried with a few sizes only; compare both at the sizes that you use"
        )


def note_on_rank(output: str) -> str:
    """What a file cannot say of an output whose number of axes depends on the sizes of inputs."""
    return (
        f"the number of axes of {output} depends on the sizes of the inputs: ONNX has one for an output, which is that "
        "of the capture; name the axes in squeeze(), or return the same number from both branches"
    )

"""What a package generates beside what its model generates, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelexport.core.text import align, plural
from modelexport.terminal.show_verification import format_parameters

if TYPE_CHECKING:
    from modelexport.tools.generate.verify_by_generation import GenerationReport, GenerationRun


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

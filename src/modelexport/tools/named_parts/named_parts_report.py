"""What named parts of a package compute beside PyTorch: each alone, one after the other, and step by step."""

from __future__ import annotations

from modelexport.core.text import align, plural
from modelexport.packages.part_reports import PartReports
from modelexport.packages.part_runs import PartRun
from modelexport.terminal.printing import format_headings
from modelexport.terminal.show_verification import format_verify
from modelexport.traces.array_differences import worst


class NamedPartsReport(PartReports, frozen=True, kw_only=True):
    """The comparison of a package of named parts with its model."""

    runs: list[PartRun]
    """The parts one after the other, then each part with a state over several steps."""

    @property
    def agrees(self) -> bool:
        """Whether every part agrees, and every output of every run."""
        outputs = [output for run in self.runs for output in run.outputs]
        compared = any(output.status == "agree" for output in outputs)
        return compared and all(report.agrees for report in self.parts.values()) and not self._wrong

    @property
    def _wrong(self) -> list[str]:
        return [run.part for run in self.runs for output in run.outputs if output.status == "differ"]


def format_named_parts(report: NamedPartsReport) -> str:
    """Each part as ``verify`` shows a file, a line for each run, and a summary."""
    rows: list[tuple[object, ...]] = [("PART", "INPUTS", "STEP", "STATUS", "LARGEST ERROR", "")]
    for run in report.runs:
        most = worst(run.outputs)
        if most is not None:
            error = f"{most.relative or 0:.1e}"
            rows.append((run.part, run.sequence, run.step, most.status, error, most.reason))
    right = sum(all(output.status != "differ" for output in run.outputs) for run in report.runs)
    summary = f"{right} of {plural(len(report.runs), 'run')} of the parts in turn return what PyTorch returns"
    parts = format_headings({name: format_verify(part) for name, part in report.parts.items()})
    return "\n".join([parts, "", align(rows, right={2, 4}), summary])

"""`sensitivity`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modelexport.core.declared_options import option
from modelexport.errors import UsageError
from modelexport.terminal.progress import stages_on_line
from modelexport.terminal.shared_options import (
    COMPARED,
    DEVICE,
    FILE_OR_FOLDER,
    JOBS,
    METRIC,
    THROUGH,
    CalibrationData,
    device_text,
)
from modelexport.terminal.table_options import ONLY, TableOptions, show


@dataclass(frozen=True, kw_only=True)
class Measured:
    """How the change is measured"""

    metric: str = METRIC
    output_name: str | None = COMPARED
    every_run: bool = option(False, "Use all inputs, even if more inputs do not change the order of the modules.")
    provider: str = DEVICE
    through: str | None = THROUGH
    jobs: int | None = JOBS


def sensitivity(
    file: Path = FILE_OR_FOLDER,
    to: str = option(..., "The method, as for quantize.", metavar="METHOD"),
    selectors: Sequence[str] = ONLY,
    *,
    measured: Measured,
    calibration: CalibrationData,
    shown: TableOptions,
) -> None:
    """Show how much the output of FILE changes if only one module is quantized."""
    from modelexport.packages.changed_packages import only_graph
    from modelexport.tagged.file import read_tagged
    from modelexport.tools.quantize.sensitivity import COLUMNS, STEADY
    from modelexport.tools.quantize.sensitivity import sensitivity as measure

    if calibration.data is None:
        raise UsageError("errors are measured on inputs like those that the model will get: give --data")
    shown.check(COLUMNS)
    tagged = read_tagged(only_graph(file))
    tagged.select(*selectors)  # before the work, not after it
    with stages_on_line()("measure"):
        report = measure(
            tagged,
            to=to,
            data=calibration.data,
            metric=measured.metric,
            output_name=measured.output_name,
            processor=calibration.processor or (file if file.is_dir() else None),
            steady=2.0 if measured.every_run else STEADY,
            device=device_text(measured.provider, measured.through),
            executor=measured.jobs,
        )
    show({"": report.table}, "sensitivity", selectors, shown, {"": report})

"""``verify FILE --device NAME``: whether a file is right on a device, and if not, which module is wrong there.

The whole file is run first. Only if it is wrong, its calls are run, each alone with right values at its inputs, down to
the smallest that is wrong; where all parts of a call are right and the call is not, the device fuses or casts across
them, and the smallest wrong region of its nodes is found by halving.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from modelexport.core.limits import DEVICE_SECONDS
from modelexport.errors import UsageError
from modelexport.files.path_or_model import Source
from modelexport.runtime.devices import CPU, find_device
from modelexport.tables.table import Table
from modelexport.tagged.file import TaggedFile, as_tagged, read_tagged
from modelexport.terminal.progress import stages_on_line
from modelexport.tools.devices.device_check import check
from modelexport.tools.devices.device_regions import RegionCutter
from modelexport.tools.devices.device_report import DeviceReport
from modelexport.tools.devices.device_text import format_device
from modelexport.tools.devices.found_changes import find_changes
from modelexport.tools.devices.judged_regions import RegionRuns
from modelexport.tools.devices.kits import verify_results
from modelexport.tools.devices.placement_table import placement_table
from modelexport.tools.quantize.quantize import check_quantized_writable
from modelexport.traces.inputs_and_example_sizes import make_feeds
from modelexport.traces.tolerances import ON_A_DEVICE, check_bound


def verify_on_device(
    file: Source | TaggedFile,
    device: str,
    *,
    modules: Sequence[str] = (),
    inputs: Mapping[str, Any] | str | Path | None = None,
    bound: float = ON_A_DEVICE,
    limit: float = DEVICE_SECONDS,
    keep: bool = True,
    fix: str | Path | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda step: None,
) -> DeviceReport:
    """Run a tagged file on a device, compare it with what it should compute, and find the module that is wrong.

    Args:
        file: A tagged file. It is right by definition: its values are computed exactly, in float64.
        device: ``NAME[,option=value...]``, as ``modelexport devices`` lists them, or with `` through COMMAND``.
        modules: Selectors of calls that are run alone even if the whole is right.
        inputs: Arrays by name, or a file of them; by default those of the reference values, or random ones.
        bound: How far off calls may be, as a share of their size.
        limit, keep: The seconds that a run may take, and whether results are kept and used.
        fix: A file to write that is right there, if there is a change that makes it so.
        seed: For random inputs.
        progress: Called with the name of each region that is run.

    Raises:
        UsageError: This machine does not have the device, or a module does not exist, or a number makes no sense.
        FileFormatError: The file is missing or damaged.
        InputsError: The inputs do not fit.
        OutputError: The changed file cannot be written.
    """
    check_bound(bound)
    if not limit > 0:
        raise UsageError(f"{limit:g} is not a limit: give seconds")
    on, tagged = find_device(device, limit), as_tagged(file)
    fix = None if fix is None else Path(fix)
    if fix is not None:
        check_quantized_writable(fix, tagged.path)
    chosen = tagged.select(*modules).calls if modules else ()
    feeds, source = make_feeds(tagged, tagged.path, inputs, {}, provider=CPU, seed=seed)
    with RegionRuns(on, limit=limit, keep=keep) as runs:
        regions = RegionCutter(tagged, feeds)
        report = check(regions, runs, modules=chosen, inputs=source, bound=bound, tell=progress)
        if fix is None or report.agrees:
            return report
        return msgspec.structs.replace(report, fix=find_changes(regions, report, fix, runs, progress))


def verify_with_table(
    file: Path,
    device: str,
    results: Path | None,
    *,
    inputs: Path | None = None,
    bound: float = ON_A_DEVICE,
    **on_device: Any,
) -> tuple[DeviceReport, str, Table]:
    """The report of :func:`verify_on_device`, or of the results of a kit; its text, and where the nodes run."""
    stages, tagged = stages_on_line(), read_tagged(file)
    with stages("verify"):
        if results is not None:
            report = verify_results(tagged, results, inputs=inputs, bound=bound)
        else:
            report = verify_on_device(tagged, device, inputs=inputs, bound=bound, progress=stages.tell, **on_device)
    return report, format_device(report), placement_table(tagged, report)

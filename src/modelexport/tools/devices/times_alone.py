"""Times calls by cutting each out, for devices that compile graphs: ONNX Runtime has no times of their nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from modelexport.core.calls import ModuleCall
from modelexport.core.limits import DEVICE_SECONDS
from modelexport.core.timed_stages import with_progress
from modelexport.errors import RunError, UsageError
from modelexport.files.path_or_model import Source
from modelexport.runtime.devices import CPU, find_device
from modelexport.tables.columns import Column, Kind
from modelexport.tables.table import Table
from modelexport.tagged.file import read_tagged
from modelexport.tools.devices.device_regions import RegionCutter
from modelexport.tools.devices.judged_regions import RegionRuns
from modelexport.traces.inputs_and_example_sizes import make_feeds

SECONDS_ALONE = Column("seconds_alone", "seconds, cut out", Kind.LARGEST, scale=10**9)


def time_calls_alone(
    file: Source,
    *,
    device: str,
    inputs: Mapping[str, Any] | Path | None = None,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    tell: Callable[[str], None] = lambda step: None,
) -> Table:
    """The median time of each call, run alone on a device; the root is the whole file."""
    tagged, nanoseconds = read_tagged(file), dict[ModuleCall, int]()
    feeds, source = make_feeds(tagged, tagged.path, inputs, sizes or {}, provider=CPU, seed=seed)
    regions, on = RegionCutter(tagged, feeds), find_device(device)
    with RegionRuns(on, limit=DEVICE_SECONDS, keep=True) as runs:
        for traced in with_progress(tagged.calls.calls):
            tell(str(traced.call))
            try:
                region = regions.of_call(traced.call) if traced.parent is not None else regions.whole()
            except UsageError:
                continue
            result = runs.run(region) if region is not None else None
            if result is not None and result.status == "ran":
                nanoseconds[traced.call] = round(result.seconds * 1e9)
            elif result is not None and traced.parent is None:
                raise RunError(f"{tagged.path} does not run on {on}: {result.message}")
    notes = [
        f"{on} compiles its graphs: each call was cut out and run alone, with the time to get values there and back; "
        f"inputs: {source}"
    ]
    if on.simulated:
        notes.append(f"{on.name} is a simulator here: its times tell nothing about the device")
    direct = {SECONDS_ALONE.name: nanoseconds}
    columns = (SECONDS_ALONE,)
    return Table(tagged.calls, tagged.tags, columns, direct=direct, name=tagged.path.name, notes=tuple(notes))

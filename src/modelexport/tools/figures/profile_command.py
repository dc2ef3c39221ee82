"""`profile`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from modelexport.core.declared_options import option
from modelexport.errors import UsageError
from modelexport.terminal.model_argument import Loading, ModelChoice
from modelexport.terminal.progress import stages_on_line
from modelexport.terminal.shared_options import ARRAYS, DEVICE, FILE_OR_FOLDER, THROUGH, device_text, parsed_sizes
from modelexport.terminal.table_options import ONLY, SIZE, TableOptions, selected_calls, show
from modelexport.tools import function_of_option

LevelName = Literal["all", "extended", "basic", "none"]


@dataclass(frozen=True, kw_only=True)
class TimedRuns:
    """How FILE is run"""

    runs: int = option(10, "The number of measured runs.", metavar="N", least=1)
    warmup: int = option(2, "The number of runs before the measured ones.", metavar="N", least=0)
    level: LevelName = option("all", "ONNX Runtime's optimization level.")
    provider: str = DEVICE
    through: str | None = THROUGH


@dataclass(frozen=True, kw_only=True)
class TimedBeside:
    """What it is compared with"""

    against: Path | None = option(
        None, "Another ONNX file of the same model, for example a quantized one.", metavar="OTHER.onnx", file="read"
    )
    against_torch: str | None = option(
        None, "Compare with the time of the same model in PyTorch.", metavar="MODEL", file="model"
    )


def profile(
    file: Path = FILE_OR_FOLDER,
    selectors: Sequence[str] = ONLY,
    inputs: Path | None = ARRAYS,
    size: Sequence[str] = SIZE,
    *,
    how: TimedRuns,
    beside: TimedBeside,
    loading: Loading,
    shown: TableOptions,
) -> None:
    """Run FILE in ONNX Runtime as users do, and show the time and memory of each module."""
    from modelexport.tables import columns

    compared = beside.against is not None or beside.against_torch is not None
    shown.check((*columns.PROFILE, columns.AGAINST, columns.RATIO) if compared else columns.PROFILE)
    loading.check(beside.against_torch, "--against-torch")
    if beside.against is not None and beside.against_torch is not None:
        raise UsageError("give --against or --against-torch, not both")
    if beside.against_torch is not None and file.is_dir():
        raise UsageError(f"{file} is a folder: give --against-torch with a file of the whole model")
    from modelexport.packages.measured_parts import profile_parts
    from modelexport.runtime.devices import find_device
    from modelexport.tagged.file import read_tagged
    from modelexport.tagged.package import files_of

    if selectors:
        selected_calls({name: read_tagged(part) for name, part in files_of(file).items()}, selectors)  # before the work
    device = find_device(device_text(how.provider, how.through))
    if device.compiles and not file.is_dir():
        if compared:
            raise UsageError(f"{device} compiles its graphs: --against and --against-torch go with other devices")
        where: dict[str, Any] = {"inputs": inputs, "sizes": parsed_sizes(size), "seed": loading.seed}
        table = function_of_option("profile --device")(file, device=str(device), tell=stages_on_line().tell, **where)
        show({"": table}, "seconds_alone", selectors, shown)
        return
    if how.through is not None:
        raise UsageError(f"{file} is a folder: --through goes with a file")
    running = {name: value for name, value in dataclasses.asdict(how).items() if name != "through"}
    stages = stages_on_line()
    run_inputs: Any = inputs
    if beside.against_torch is not None:
        loaded, example = ModelChoice(beside.against_torch, inputs, loading).of_file(file).load(stages)
        from modelexport.pytorch.inputs.named_inputs import feeds
        from modelexport.runtime.sessions import open_file, session_options

        run_inputs = feeds(example, open_file(file, session_options("none", how.provider)))
    both = f" and {beside.against.name} in turns" if beside.against is not None else ""
    with stages(f"run {file.name}{both}"):
        running |= {"sizes": parsed_sizes(size), "seed": loading.seed, "against": beside.against}
        measured = profile_parts(file, run_inputs, **running)
    if beside.against_torch is not None:
        from modelexport.pytorch.calls.call_times import time_calls
        from modelexport.tables.side_by_side import profile_beside

        with stages("run PyTorch"):
            seconds = time_calls(loaded.model, example, runs=how.runs, warmup=how.warmup)
        measured = {name: profile_beside(part, seconds) for name, part in measured.items()}
    from modelexport.tables.html_page import Page

    pages = [Page(part.table, "seconds", part.sections, name) for name, part in measured.items()]
    show({name: part.table for name, part in measured.items()}, "seconds", selectors, shown, measured, pages)

"""Regions run on a device: whether one is right there, and if not, whether its type is to blame."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Protocol

from modelexport.errors import UsageError
from modelexport.runtime.devices import Device
from modelexport.runtime.runner_process import RunnerProcess, RunnerResult, write_for_runner
from modelexport.tools.devices.device_regions import ReferenceRegion
from modelexport.tools.devices.device_report import RegionStatus
from modelexport.traces.tolerances import TIMES_ROUNDING


class NoResultError(UsageError):
    """Nothing ran this region: the results of a kit lack it."""


class RegionRunner(Protocol):
    """What runs regions on a device."""

    device: Device
    measured: int
    runs_any_region: bool
    """Whether it can run any region of nodes."""

    def run(self, region: ReferenceRegion, *, log: bool = False) -> RunnerResult:
        """Run a region."""


class RegionRuns(RunnerProcess):
    """A device that regions run on, each in a folder that is removed again."""

    runs_any_region = True

    def run(self, region: ReferenceRegion, *, log: bool = False) -> RunnerResult:
        """Run a region, or read its result from the cache; ``log`` as :meth:`RunnerProcess.run_model` has it."""
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            folder = Path(name)
            written = write_for_runner(region.model, region.inputs, region.outputs, folder, name=region.name)
            return self.run_model(folder, written, log=log)


def judge(
    region: ReferenceRegion, result: RunnerResult, device: Device, bound: float
) -> tuple[RegionStatus, float | None]:
    """The status of a region, and what its type costs on the CPU if it is beyond the bound.

    An error that ONNX Runtime has on the CPU as well, as in a quantized region, is not blamed on the device: the
    region agrees; but integers that saturate are wrong on any device. One that only computing in float16 explains is
    called rounding.
    """
    if result.status != "ran":
        return result.status, None
    some = len(region.outputs) < len(region.model.graph.outputs)  # others are sequences, or cannot be computed exactly
    if not any(array.size for array in region.outputs.values()) or (some and result.error <= bound):
        return "not compared", None
    if result.error <= bound:
        return "agree", None
    try:
        on_cpu = region.errors_on_cpu()
    except UsageError:  # the CPU has no kernel
        on_cpu = 0.0
    rounding = max(on_cpu, region.cost_of_half() if device.computes == "float16" else 0.0)
    if result.error <= TIMES_ROUNDING * on_cpu:
        return "agree", rounding
    return ("rounding" if result.error <= TIMES_ROUNDING * rounding else "off"), rounding

"""Runs regions of a file on a device."""

from __future__ import annotations

import tempfile
from pathlib import Path

from modelexport.runtime.runner_process import RunnerProcess, RunnerResult, write_for_runner
from modelexport.tools.devices.device_regions import ReferenceRegion


class RegionRuns(RunnerProcess):
    """A device that regions run on, each in a folder that is removed again."""

    runs_any_region = True

    def run(self, region: ReferenceRegion, *, log: bool = False) -> RunnerResult:
        """Run a region, or read its result from the cache; ``log`` as :meth:`RunnerProcess.run_model` has it."""
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            folder = Path(name)
            written = write_for_runner(region.model, region.inputs, region.outputs, folder, name=region.name)
            return self.run_model(folder, written, log=log)

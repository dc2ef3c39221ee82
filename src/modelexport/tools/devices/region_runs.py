"""Runs regions of a file on a device."""

from __future__ import annotations

import tempfile
from pathlib import Path

from modelexport.runtime.part_process import PartProcess, PartResult, write_part
from modelexport.tools.devices.device_regions import Region


class RegionRuns(PartProcess):
    """A device that regions run on, each in a folder that is removed again."""

    runs_any_region = True

    def run(self, region: Region, *, log: bool = False) -> PartResult:
        """Run a region, or read its result from the cache; ``log`` as :meth:`PartProcess.run_part` has it."""
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            folder = Path(name)
            part = write_part(region.model, region.inputs, region.outputs, folder, name=region.name)
            return self.run_part(folder, part, log=log)

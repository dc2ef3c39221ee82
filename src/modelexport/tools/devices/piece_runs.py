"""Runs pieces of a file on a device."""

from __future__ import annotations

import tempfile
from pathlib import Path

from modelexport.runtime.part_process import PartProcess, PartResult, write_part
from modelexport.tools.devices.pieces import Piece


class PieceRuns(PartProcess):
    """A device that pieces run on, each in a folder that is removed again."""

    runs_any_span = True

    def run(self, piece: Piece, *, log: bool = False) -> PartResult:
        """Run a piece, or read its result from the cache; ``log`` as :meth:`PartProcess.run_part` has it."""
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            folder = Path(name)
            part = write_part(piece.model, piece.inputs, piece.outputs, folder, name=piece.name)
            return self.run_part(folder, part, log=log)

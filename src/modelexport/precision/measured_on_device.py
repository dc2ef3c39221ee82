"""Quantized versions of a file on a device: each is a model of its own, since devices do not run an ``If``."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelexport.precision.methods import Method
from modelexport.precision.quantize import Feeds, calibrate, quantize_model
from modelexport.precision.switched_model import Choice, Switched, Unit
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tagged.file import TaggedFile


class OnDevice(Switched):
    """As :class:`Switched`; a choice is run on a device, the right values on the processor."""

    def __init__(
        self,
        tagged: TaggedFile,
        units: Sequence[Unit],
        methods: Sequence[Method],
        feeds: Feeds,
        device: str,
        output: str | None,
    ) -> None:
        """Quantize every unit by every method.

        Args:
            feeds: Inputs to measure ranges with.
            device: ``NAME[,option=value...]``.

        Raises:
            UsageError: As :class:`Switched`, or this machine does not have the device.
        """
        self._tagged, self._units, self._device = tagged, units, device
        self._session: tuple[Choice, Any] | None = None
        with tempfile.TemporaryDirectory(prefix="modelexport-ranges-") as folder:
            measured = any(method.row.needs_data for method in methods)
            ranges = calibrate(tagged.model, feeds, Path(folder)) if measured else None
            self._ranges = ranges.read_bytes() if ranges is not None else None
            super().__init__(tagged, units, methods, ranges=ranges, output=output)

    def run(self, feeds: Any, choice: Choice | None = None) -> Any:
        """The output for inputs, with a method for some units.

        Raises:
            UsageError: The model does not run with these inputs.
        """
        if choice is None:
            return super().run(feeds)
        if self._session is None or self._session[0] != choice:
            assignment = {name: method for index, method in choice.items() for name in self._units[index].nodes}
            with tempfile.TemporaryDirectory(prefix="modelexport-ranges-") as folder:
                ranges = Path(folder, "ranges.json")
                ranges.write_bytes(self._ranges or b"")
                model = quantize_model(self._tagged.model, assignment, ranges=ranges if self._ranges else None)
            beside = self._tagged.path.parent
            self._session = choice, open_session(model, folder=beside, provider=self._device, optimized=True)
        return run_session(self._session[1], feeds)[self.output]

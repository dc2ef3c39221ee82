"""Quantized versions of a file on a device: each is a model of its own, since devices do not run an ``If``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.errors import RunError
from modelexport.runtime.devices import find_device
from modelexport.runtime.runner_process import RunnerProcess, write_for_runner
from modelexport.tagged.file import TaggedFile
from modelexport.tools.quantize.methods import Method, Ranges
from modelexport.tools.quantize.quantize import quantize_model
from modelexport.tools.quantize.switched_model import Choice, SwitchableSession, Unit


class SessionOnDevice(SwitchableSession):
    """A :class:`SwitchableSession` that runs choices on a device, in a process of its own, and right values here."""

    def __init__(
        self,
        tagged: TaggedFile,
        units: Sequence[Unit],
        methods: Sequence[Method],
        ranges: Ranges | None,
        device: str,
        output: str | None,
    ) -> None:
        """Quantize every unit by every method.

        Args:
            ranges: As for :class:`SwitchableSession`.
            device: ``NAME[,option=value...]``.
        """
        self._tagged, self._ranges = tagged, ranges
        self._process = RunnerProcess(find_device(device))
        self._models = 0
        self._current: tuple[object, Callable[[Mapping[str, Any]], Any]] = None, lambda feeds: None
        try:
            super().__init__(tagged, units, methods, ranges=ranges, output=output)
            self.exactness = (True,)  # the device computes as it does
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *raised: object) -> None:
        self._process.__exit__(*raised)

    def run(self, feeds: Mapping[str, Any], choice: Choice | None = None, *, exact: bool = True) -> Any:
        """The output for inputs, with a method for some units; ``None`` if the device does not run it.

        Raises:
            UsageError: The model does not run with these inputs on the CPU.
        """
        if choice is None:
            return super().run(feeds)
        if self._current[0] != choice:
            assignment = {name: method for index, method in choice.items() for name in self.units[index].nodes}
            model = quantize_model(self._tagged.model, assignment, ranges=self._ranges)
            self._current = dict(choice), self.opened(model)[0]
        return self._current[1](feeds)

    def kept(self, feeds: Mapping[str, Any]) -> Any:
        """As :meth:`SwitchableSession.kept`."""
        if (output := self.run(feeds, {})) is None:
            raise RunError(f"{self._tagged.path} does not run on {self._process.device}: {self.failure}")
        return self._right(output)

    def opened(self, model: ir.Model) -> list[Callable[[Mapping[str, Any]], Any]]:
        """As :meth:`SwitchableSession.opened`, on the device.

        The one function returns ``None`` if the device does not run the model.
        """
        self._models += 1
        folder = self._process.folder / str(self._models)
        folder.mkdir()

        def run(feeds: Mapping[str, Any]) -> Any:
            shapes = "_".join("x".join(map(str, np.shape(array))) for array in feeds.values())
            written = write_for_runner(
                model, feeds, {self.output: None}, folder, name="quantized", stem=f"model_{shapes}"
            )
            result = self._process.run_model(folder, written)
            if result.status != "ran":
                self.failure = f"{result.status}: {result.message}"
                return None
            return np.load(folder / written["outputs"][0]["save"])

        return [run]

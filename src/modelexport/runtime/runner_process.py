"""Runs models on a device in a process of its own, which may crash or hang, and keeps what became of them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import numpy as np
import onnx_ir as ir

from modelexport.core.limits import DEVICE_SECONDS
from modelexport.core.version import __version__
from modelexport.errors import OutputError, RunError
from modelexport.files.atomic_writing import scratch
from modelexport.files.onnx_models import save_model
from modelexport.graph.copies import copy_of
from modelexport.graph.nodes import inputs_and_results
from modelexport.runtime import runner
from modelexport.runtime.devices import Device
from modelexport.runtime.runner_commands import CommandProcess

_PLACE = re.compile(r"(Load model from )?\S*model\.onnx")
State = Literal["ran", "failed", "crashed", "hung"]
"""``failed``: ONNX Runtime raised an error; ``crashed``: its process ended; ``hung``: it was not done in time."""


class RunnerResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of running a model on a device."""

    status: State
    message: str = ""
    errors: dict[str, float | None] = {}
    """Names of outputs to errors; ``None`` if one cannot be compared with the right array."""
    nodes: dict[str, list[list[str]]] = {}
    """Providers to the names of nodes in each of the graphs that they run."""
    load_seconds: float = 0.0
    seconds: float = 0.0
    log: str = ""
    """The lines that the provider logged, if they were asked for."""
    saved: dict[str, bytes] = {}
    """The files that a runner behind a command saved."""

    @property
    def error(self) -> float:
        """The largest error; infinite if it did not run."""
        return largest(self.errors.values()) if self.status == "ran" else float("inf")

    def is_of(self, outputs: Collection[str]) -> bool:
        """Whether it has an error, which is not negative, for each of these outputs and for no others."""
        return self.errors.keys() == {*outputs} and all(error is None or error >= 0 for error in self.errors.values())


def largest(errors: Iterable[float | None]) -> float:
    """The largest of some errors; infinite if one is of arrays that cannot be compared."""
    return max((float("inf") if error is None else error for error in errors), default=0.0)


class RunnerProcess:
    """A process that runs models on a device, one after the other; a context manager.

    Args:
        limit: Seconds that a model may take.
        keep: Whether results are read from and written to the cache of the user.
    """

    def __init__(self, device: Device, *, limit: float = DEVICE_SECONDS, keep: bool = False) -> None:
        self.device, self.limit, self._keep = device, limit, keep
        self._process: subprocess.Popen[bytes] | None = None
        self._command: CommandProcess | None = None
        self._ran = 0
        self._stack = ExitStack()
        self._log = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - closed with the stack
        self.folder = _own_folder(self._stack)
        """Where models are written; a killed run leaves it, and the next run removes it."""
        self.measured = 0
        """The number of models that were run, and not read from the cache."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._end()
        self._stack.close()

    def run_model(self, folder: Path, model: Mapping[str, Any], *, log: bool = False) -> RunnerResult:
        """Run a model, or read its result from the cache.

        Args:
            model: What :func:`write_for_runner` returned.
            log: Whether what the provider says of the nodes that it refuses is wanted.
        """
        device = {**msgspec.to_builtins(self.device), "log": 0 if log else 4}
        key, place = hashlib.sha256(json.dumps([model, device, __version__]).encode()), None
        if self._keep:
            for file in sorted(folder.rglob("*")):
                key.update(file.read_bytes())
            place = _cache() / f"{key.hexdigest()}.json"
            if (kept := _cached_result(place)) is not None:
                return kept
        self.measured += 1
        job = {"folder": str(folder), "model": model, "device": device}
        alone = self._ran == 0
        result = self._answer(dict(job))
        if result.status == "crashed" and not alone:  # what ran before may have damaged the process
            result = self._answer(dict(job))
        if place is not None and result.status != "hung":
            with suppress(OSError):  # it is measured again next time
                place.write_bytes(msgspec.json.encode(result))
        return result

    def _answer(self, job: dict[str, Any]) -> RunnerResult:
        return self._answer_behind(job) if self.device.through else self._answer_here(json.dumps(job))

    def _answer_behind(self, job: dict[str, Any]) -> RunnerResult:
        """The same behind a command: the files of the model are sent there, and those that it saves come back."""
        folder, outputs = Path(job.pop("folder")), job["model"]["outputs"]
        files = {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        try:
            self._command = self._command or CommandProcess(self.device.through, self.limit)
            self._ran += 1
            result = self._command.run(job, files, self.limit, RunnerResult)
        except (RunError, TimeoutError) as error:
            self._end()
            return RunnerResult(status="hung" if isinstance(error, TimeoutError) else "crashed", message=str(error))
        saved = [value["save"] for value in outputs if "save" in value]
        compared = [value["name"] for value in outputs if "save" not in value]
        if result.status == "ran" and not (result.is_of(compared) and result.saved.keys() >= {*saved}):
            raise self._command.other_answer(result.errors)
        for name in saved if result.status == "ran" else ():
            (folder / name).write_bytes(result.saved[name])
        return msgspec.structs.replace(result, saved={})

    def _answer_here(self, job: str) -> RunnerResult:
        process = self._process or self._begin()
        assert process.stdin is not None
        assert process.stdout is not None
        self._log.seek(0)  # for the process as well, which shares the position
        self._log.truncate()
        self._ran += 1
        line = b""
        try:
            process.stdin.write(job.encode() + b"\n")
            process.stdin.flush()
            if not select.select([process.stdout], [], [], self.limit)[0]:
                self._end()
                return RunnerResult(status="hung", message=f"not done after {self.limit:g} s")
            line = process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            code = process.wait()
            self._end()
            ending = f"signal {-code}" if code < 0 else f"status {code}"
            return RunnerResult(status="crashed", message=f"the process ended with {ending}")
        self._log.seek(0)
        result = msgspec.json.decode(line, type=RunnerResult)
        text = self._log.read().decode(errors="replace")
        return msgspec.structs.replace(result, log=text, message=_PLACE.sub("the model", result.message))

    def _begin(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, runner.__file__, "--serve"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, bufsize=0
        )
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        if self._command is not None:
            self._command.end()
        self._process, self._command, self._ran = None, None, 0


def _cache() -> Path:
    """The folder of the user for results and for models while they run."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "modelexport", "devices")


def _own_folder(stack: ExitStack) -> Path:
    """A folder that is removed with the stack."""
    try:
        _cache().mkdir(parents=True, exist_ok=True)
        return stack.enter_context(scratch(_cache()))
    except (OSError, OutputError):  # the cache cannot be written
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="modelexport-device-")))


def _cached_result(place: Path) -> RunnerResult | None:
    """The result in a file of the cache; ``None`` if it is not there, or damaged."""
    try:
        return msgspec.json.decode(place.read_bytes(), type=RunnerResult)
    except (OSError, msgspec.MsgspecError):
        return None


def write_for_runner(
    model: ir.Model,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    folder: Path,
    *,
    name: str,
    stem: str = "model",
    values: str = "",
) -> dict[str, Any]:
    """Write a model with its values; returns its entry in ``kit.json``.

    Devices that compile need sizes, so the model is written with those of its inputs.

    Args:
        outputs: Names of outputs to the right arrays, or to ``None``: then the runner saves what it computes.
        name: The name of the model.
        values: The folder of the values in ``folder``.
    """
    save_model(with_fixed_sizes(model, inputs), folder / f"{stem}.onnx")
    sides = {
        side: [_write_value(folder, values, key, array) for key, array in arrays.items()]
        for side, arrays in (("inputs", inputs), ("outputs", outputs))
    }
    return {"name": name, "file": f"{stem}.onnx", **sides}


def with_fixed_sizes(model: ir.Model, inputs: Mapping[str, Any]) -> ir.Model:
    """A copy of a model, with the sizes of inputs in the place of dynamic axes."""
    copy = copy_of(model)
    if not inputs_with_dynamic_axes(model, inputs):
        return copy
    for value in inputs_and_results(copy):
        if value.is_graph_input() and value.name in inputs:
            value.shape = ir.Shape(inputs[value.name or ""].shape)
        elif value.shape is not None and not value.shape.is_static() and not value.is_graph_output():
            value.shape = None  # the runtime infers it again
    return copy


def inputs_with_dynamic_axes(model: ir.Model, inputs: Collection[str]) -> list[str]:
    """The names of those inputs that have dynamic axes."""
    values = (value for value in model.graph.inputs if value.name in inputs)
    return [value.name or "" for value in values if value.shape is None or not value.shape.is_static()]


def _write_value(folder: Path, values: str, name: str, array: Any) -> dict[str, Any]:
    if array is None:
        return {"name": name, "save": f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.npy"}
    content = array.tobytes()
    path = folder / values / f"{hashlib.sha256(content).hexdigest()[:24]}.bin"
    if not path.exists():
        path.write_bytes(content)
    return {
        "name": name,
        "value": path.relative_to(folder).as_posix(),
        "dtype": np.dtype(array.dtype).name,
        "shape": list(array.shape),
    }

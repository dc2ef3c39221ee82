"""Runs parts on a device in a process of its own, which may crash or hang, and keeps the results."""

from __future__ import annotations

import hashlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from modelexport.core.version import __version__
from modelexport.devices import runner
from modelexport.devices.pieces import Piece, largest
from modelexport.runtime.devices import Device

LIMIT = 300.0
"""Seconds that a part may take."""
State = Literal["ran", "failed", "crashed", "hung"]
"""``failed``: ONNX Runtime raised an error; ``crashed``: its process ended; ``hung``: it was not done in time."""


class PartResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a part on a device."""

    status: State
    message: str = ""
    errors: dict[str, float | None] = {}
    """Names of outputs to errors; ``None`` if one cannot be compared with the right array."""
    nodes: dict[str, list[list[str]]] = {}
    """Providers to the names of nodes in each of the graphs that they run."""
    load_seconds: float = 0.0
    seconds: float = 0.0
    log: str = ""
    """What the provider wrote, if it was asked to."""

    @property
    def error(self) -> float:
        """The largest error; infinite if it did not run."""
        return largest(self.errors.values()) if self.status == "ran" else float("inf")


class PartRuns:
    """A device, and a process that runs parts on it one after the other; a context manager.

    Args:
        limit: Seconds that a part may take.
        keep: Whether results are read from and written to the cache of the user.
    """

    halves = True

    def __init__(self, device: Device, *, limit: float = LIMIT, keep: bool = True) -> None:
        self.device, self._limit, self._keep = device, limit, keep
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._parts = 0
        self.measured = 0
        """The number of parts that were run, and not read from the cache."""

    def __enter__(self) -> PartRuns:
        return self

    def __exit__(self, *raised: object) -> None:
        self._end()
        self._log.close()

    def run(self, piece: Piece, *, session: Mapping[str, str] | None = None, log: bool = False) -> PartResult:
        """Run a piece, or read its result from the cache.

        Args:
            session: Entries of the session's configuration.
            log: Whether what the provider says of the nodes that it refuses is wanted.
        """
        with tempfile.TemporaryDirectory(prefix="modelexport-device-") as name:
            folder = Path(name)
            part = write_part(piece, folder, piece.name, folder)
            device = {**msgspec.to_builtins(self.device), "session": dict(session or {}), "log": 0 if log else 4}
            key = _digest([*sorted(folder.rglob("*"))], [json.dumps(part), json.dumps(device), __version__])
            place = _cache() / f"{key}.json"
            if self._keep and place.is_file():
                return msgspec.json.decode(place.read_bytes(), type=PartResult)
            job = json.dumps({"folder": name, "part": part, "device": device})
            self.measured += 1
            alone = self._parts == 0
            result = self._answer(job)
            if result.status == "crashed" and not alone:  # what ran before may have damaged the process
                result = self._answer(job)
        if self._keep and result.status != "hung":
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(msgspec.json.encode(result))
        return result

    def _answer(self, job: str) -> PartResult:
        process = self._process or self._begin()
        assert process.stdin is not None and process.stdout is not None
        self._log.truncate(0)
        self._parts += 1
        line = b""
        try:
            process.stdin.write(job.encode() + b"\n")
            process.stdin.flush()
            if not select.select([process.stdout], [], [], self._limit)[0]:
                self._end()
                return PartResult(status="hung", message=f"not done after {self._limit:g} s")
            line = process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            code = process.wait()
            self._end()
            return PartResult(status="crashed", message=f"the process ended with {_ending(code)}")
        self._log.seek(0)
        result = msgspec.json.decode(line, type=PartResult)
        return msgspec.structs.replace(result, log=self._log.read().decode(errors="replace"))

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
        self._process, self._parts = None, 0


def write_part(piece: Piece, folder: Path, name: str, values: Path, stem: str = "part") -> dict[str, Any]:
    """Write a piece with its values; returns its entry in ``kit.json``."""
    piece.write(folder / f"{stem}.onnx")
    sides = {}
    for side, arrays in (("inputs", piece.inputs), ("outputs", piece.outputs)):
        sides[side] = [_write_value(folder, values, key, array) for key, array in arrays.items()]
    return {"name": name, "file": f"{stem}.onnx", "nodes": len(piece.nodes), **sides}


def _write_value(folder: Path, values: Path, name: str, array: Any) -> dict[str, Any]:
    content = array.tobytes()
    path = values / f"{hashlib.sha256(content).hexdigest()[:24]}.bin"
    if not path.exists():
        path.write_bytes(content)
    return {
        "name": name,
        "value": path.relative_to(folder).as_posix(),
        "dtype": np.dtype(array.dtype).name,
        "shape": list(array.shape),
    }


def _digest(files: list[Path], texts: list[str]) -> str:
    digest = hashlib.sha256("\0".join(texts).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "modelexport", "devices")


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"status {code}"

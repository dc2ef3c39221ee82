"""A Python behind a command (``ssh board``, ``docker run -i IMAGE``, ``qemu-x86_64 -cpu Haswell``) that runs models.

Python 3 with numpy and onnxruntime has to be there. No folder is shared: the runner, the files of models and their
results go through standard input and output, and files are in a temporary folder there that is removed.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import json
import math
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import msgspec

from modelexport.core.limits import SETTINGS_BYTES
from modelexport.core.text import shortened
from modelexport.errors import RunError, UsageError
from modelexport.runtime import runner, runner_elsewhere

_T = TypeVar("_T")
READY = "modelexport is ready"
_START = (
    f"import sys; print('{READY}', flush=True); "
    "exec(compile(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())), 'runner', 'exec'), {'__name__': 'runner'})\n"
)
"""What the other Python runs first. It begins without arguments that a shell on the way could change."""
SERVE = """import os, traceback
try:
    exec(compile({!r}, 'runner', 'exec'))
    serve_elsewhere()
except BaseException:
    traceback.print_exc()
    os._exit(1)
"""
"""The runner; an interactive Python would go on after an error."""
_PYTHONS = (sys.executable, "python3")
"""An emulator runs this Python, by its path; another machine or a container has its own."""
SECONDS = 60.0
"""How long the other Python may take to begin."""
LAST_SECONDS = 5.0
"""How long a command may run after it closed its output or its input."""
_WORDS = 300
"""Characters of a command's last words that a message shows."""


class Facts(msgspec.Struct, frozen=True):
    """The ONNX Runtime behind a command."""

    onnxruntime: str
    platform: str
    providers: list[str]


class CommandProcess:
    """The Python behind a command, until :meth:`end`.

    Args:
        command: The words of the command.
        limit: Seconds that it may take to begin, if they are fewer than a minute.

    Raises:
        RunError: It cannot be started, ends, or does not begin in time. The message has its last words.
    """

    def __init__(self, command: Sequence[str], limit: float = math.inf) -> None:
        self.command, self._limit = command, min(limit, SECONDS)
        self._said: collections.deque[str] = collections.deque(maxlen=20)
        self._begin()

    def _begin(self) -> None:
        source, problem = SERVE.format(_sent(runner) + _sent(runner_elsewhere)).encode(), ""
        for python in _PYTHONS:
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
            words = [*self.command, python, "-i", "-u"]
            try:
                process = subprocess.Popen(
                    words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    bufsize=0,
                    start_new_session=True,
                )
            except OSError as error:
                errors.close()
                raise RunError(
                    f"{shlex.join(self.command)} cannot be started ({error.strerror or error}): give a command after "
                    "which words name a program to run"
                ) from error
            self._process, self._errors = process, errors
            assert process.stdin is not None
            os.set_blocking(process.stdin.fileno(), False)
            try:
                self._write(_START.encode(), self._limit)
                self._line(self._limit, until=READY)
                self._write(b"%d\n" % len(source) + source, self._limit)
            except RunError as error:
                problem = problem or str(error)
                self.end()
            except TimeoutError as error:
                self.end()
                raise RunError(f"`{shlex.join(self.command)}` does not begin ({error}): run it by hand") from error
            else:
                return
        raise RunError(problem)

    def run(self, job: dict[str, Any], files: dict[str, bytes], limit: float, kind: type[_T]) -> _T:
        """Run one job; returns the answer of the runner, with the files that it saved.

        Raises:
            RunError: The process ends.
            UsageError: Its answer is not of this kind.
            TimeoutError: It does not answer in time, or takes no input for as long.
        """
        sent = {name: base64.b64encode(content).decode() for name, content in files.items()}
        self._write(json.dumps(job | {"files": sent}).encode() + b"\n", limit)
        line = self._line(limit)
        try:
            return msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise self.other_answer(line) from error

    def other_answer(self, said: object) -> UsageError:
        """The error for an answer that is not that of the runner."""
        return UsageError(
            f"`{shlex.join(self.command)}` answered {shortened(str(said), _WORDS)} instead of a result: give a command "
            "that does not change what the Python behind it prints"
        )

    def end(self) -> None:
        """End the process, and everything that the command started here."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._process.wait()

    def _write(self, content: bytes, limit: float) -> None:
        """Send bytes, as fast as the command takes them; it may stop for ``limit`` seconds."""
        pipe, rest = self._process.stdin, memoryview(content)
        assert pipe is not None
        try:
            while rest:
                if not select.select([], [pipe], [], limit)[1]:
                    raise TimeoutError(f"no input taken for {limit:g} s")
                rest = rest[os.write(pipe.fileno(), rest) :]
        except BrokenPipeError:
            raise self._ended() from None

    def _line(self, limit: float, until: str = "") -> str:
        """The next line that the process prints, or the first that has a text."""
        output, begun, buffered = self._process.stdout, time.monotonic(), bytearray()
        assert output is not None
        while True:
            left = begun + limit - time.monotonic()
            if left <= 0 or not select.select([output], [], [], left)[0]:
                raise TimeoutError(f"not done after {limit:g} s")
            chunk = os.read(output.fileno(), 1 << 20)
            if not chunk:
                raise self._ended()
            buffered += chunk
            *lines, buffered = buffered.split(b"\n") if b"\n" in chunk else [buffered]
            for line in lines:
                text = line.decode(errors="replace")
                if until in text and (until or text.startswith("{")):
                    return text
                self._said.append(text)  # a login or a container may greet
            if len(buffered) > SETTINGS_BYTES and until:
                raise self._ended()

    def _ended(self) -> RunError:
        try:
            code = self._process.wait(LAST_SECONDS)
        except subprocess.TimeoutExpired:  # it closed its output or its input, and goes on
            os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
        self._errors.seek(0)
        words = [*self._said, *self._errors.read().decode(errors="replace").splitlines()]
        said = " ".join(word for word in (line.strip(" >") for line in words) if word)
        said = said[-_WORDS:] if len(said) > _WORDS else said
        ending = f"signal {-code}" if code < 0 else f"status {code}"
        return RunError(
            f"`{shlex.join(self.command)}` ended with {ending} before it answered"
            f"{f' ({shortened(said, _WORDS)})' if said else ''}: it has to run Python 3 with numpy and onnxruntime"
        )


def _sent(runner: ModuleType) -> str:
    """The source of a runner without its imports of this package, which is not there."""
    source = Path(runner.__file__ or "").read_text(encoding="utf-8")
    here = ("from __future__", "from modelexport")
    return "".join(line for line in source.splitlines(keepends=True) if not line.startswith(here))


def facts_behind(command: Sequence[str], limit: float = math.inf) -> Facts:
    """The versions and the providers of the ONNX Runtime behind a command.

    Args:
        limit: As for :class:`CommandProcess`.
    """
    process = CommandProcess(command, limit)
    try:
        return process.run({"facts": True}, {}, min(limit, SECONDS), Facts)
    except TimeoutError as error:
        raise RunError(f"`{shlex.join(command)}` does not answer ({error}): run it by hand") from error
    finally:
        process.end()

"""Commands run in this process, as ``modelexport`` runs them, with limits of time and memory."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import commands

SECONDS = 20
"""Seconds of processor time; the limit of wall time is ten times higher."""
BYTES = 2 * 2**30


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str


class TooLongError(BaseException):
    """Not an ``Exception``, which a command would convert to a message."""


def run(*arguments: str | Path) -> Ended:
    """Run a command with limits of time and memory.

    Raises:
        TooLongError: It hangs.
    """
    _reset_peak()
    before = _peak()
    with _in_time():
        done = commands.run(*arguments)
    assert _peak() - before < BYTES, f"{arguments} needed {_peak() - before:,} bytes"
    return Ended(done.returncode, done.stdout, done.stderr)


def fault(ended: Ended) -> str:
    """What is wrong with the result of a command; empty for a success, a failed check, or one clear message."""
    if ended.status not in (0, 1, 2, 3, 4):
        return f"status {ended.status}"
    for word in ("Traceback", "internal error"):
        if word in ended.err or word in ended.out:
            return ended.err[-600:]
    # A line about how the calls of a file were found may come before it.
    if ended.status > 1 and not any(line.startswith("modelexport: ") for line in ended.err.splitlines()):
        return f"no message: {ended.err!r}"
    if "\x1b" in ended.out or "\x1b" in ended.err:
        return "control characters in what is shown"
    return ""


@contextmanager
def _in_time() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGPROF, stop), signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 10 * SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGPROF, before[0])
        signal.signal(signal.SIGALRM, before[1])


def _reset_peak() -> None:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

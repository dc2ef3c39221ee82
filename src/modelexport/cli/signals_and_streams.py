"""Protects a command from its environment: signals, standard input, and the terminal that it prints to."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from modelexport.core.collected_messages import READING
from modelexport.core.text import printable
from modelexport.terminal.printing import rendered
from modelexport.terminal.progress import LINE


class Interrupted(BaseException):
    """A signal asked the command to end. Not an ``Exception``, so that only the command line catches it."""

    line = "interrupted; nothing was written"

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number
        """The status of a process that a signal ended, so that a loop around the command ends as well."""


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """In the block signals raise :class:`Interrupted`, standard input is empty, output cannot control a terminal."""
    # onnx_ir's messages about a damaged file, which Python would print, repeat what the error says.
    quiet, printed = _handled(logging.getLogger("onnx_ir"), logging.NullHandler()), _handled(READING, _Reading())
    with _signals(), _no_input(), quiet, printed, _printable(sys.stdout) as out, _printable(sys.stderr) as err:
        before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = out, err
        READING.setLevel(logging.INFO)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


class _Reading(logging.Handler):
    """Prints how the calls of a file were found, once for each file."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if (line := record.getMessage()) not in self._printed:
            self._printed.add(line)
            print(line, file=sys.stderr)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [getattr(signal, name) for name in names]
    # `nohup` makes a process ignore SIGHUP, which is kept.
    before = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}

    def interrupt(number: int, frame: object) -> None:
        for other in before:  # the first signal ends the command, and a second must not disturb that
            signal.signal(other, signal.SIG_IGN)
        raise Interrupted(number)

    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _no_input() -> Iterator[None]:
    """Make standard input empty, so that questions of a library get no answer, not even from ``yes |``."""
    before = sys.stdin
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        sys.stdin = nothing
        saved = None
        try:
            with contextlib.suppress(OSError):
                saved = os.dup(0)
                os.dup2(nothing.fileno(), 0)
            yield
        finally:
            sys.stdin = before
            if saved is not None:
                os.dup2(saved, 0)
                os.close(saved)


@contextlib.contextmanager
def _handled(logger: logging.Logger, handler: logging.Handler) -> Iterator[None]:
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Printable:
    """A stream that writes printable text to another one, and is like it otherwise."""

    def __init__(self, stream: TextIO) -> None:
        self.raw_stream = stream
        """The stream for output that is meant to control a terminal."""

    def write(self, text: str) -> int:
        LINE.erase()
        shown = rendered(text, printable)
        encoding = self.raw_stream.encoding or "utf-8"
        self.raw_stream.write(shown.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.write(text)

    def close(self) -> None:
        """Do nothing: the underlying stream is not ours."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw_stream, name)


@contextlib.contextmanager
def _printable(stream: TextIO) -> Iterator[TextIO]:
    shown = _Printable(stream)
    yield shown  # type: ignore[misc]  # it has all that a stream has
    with contextlib.suppress(BrokenPipeError, ValueError):
        stream.flush()


def raw(stream: TextIO) -> TextIO:
    """The underlying stream of one that escapes control characters, for output that controls the terminal."""
    return stream.raw_stream if isinstance(stream, _Printable) else stream

"""The line on a terminal that says what a command is doing, once it takes longer than a second."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TextIO

from modelexport.core.text import on_one_line
from modelexport.core.timed_stages import Stages, listen

AFTER = 1.0
"""Seconds before the line appears."""
EVERY = 0.25
_ERASE = "\r\x1b[K"
_WIDTH = 79
_LONG = 10.0
"""Seconds of work from which on the line says how much is left."""


class ProgressLine:
    """A line that is drawn again and again while a command runs, and erased before anything else is written."""

    def __init__(self) -> None:
        self._stream: TextIO | None = None
        self._stage = ""
        self._began = self._pieces_began = self._pieces_end = 0.0
        self._shown = False
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def start(self, stream: TextIO, stage: str) -> None:
        """Begin, if the stream is a terminal."""
        if not stream.isatty():
            return
        self._stream, self._stage, self._began = stream, stage, time.monotonic()
        listen(self.count)
        self._ended.clear()
        threading.Thread(target=self._draw_on, daemon=True).start()

    def tell(self, stage: str) -> None:
        """Name the stage that begins."""
        self._stage = on_one_line(stage)

    def count(self, done: int, whole: int) -> None:
        """Estimate, from the pieces of some work that are done, when all are."""
        now = time.monotonic()
        if not done:
            self._pieces_began = self._pieces_end = now
        else:
            self._pieces_end = self._pieces_began + (now - self._pieces_began) / done * whole

    def erase(self) -> None:
        """Make place for output."""
        if self._stream is not None and self._shown:
            with self._lock, suppress(OSError, ValueError):
                print(_ERASE, end="", file=self._stream, flush=True)
                self._shown = False

    def stop(self) -> None:
        """End, and leave nothing on the terminal."""
        self._ended.set()
        self.erase()
        self._stream = None

    def _draw_on(self) -> None:
        while not self._ended.wait(AFTER if time.monotonic() - self._began < AFTER else EVERY):
            with self._lock, suppress(OSError, ValueError):
                if self._stream is not None and not self._ended.is_set():
                    now = time.monotonic()
                    times = f" ... {now - self._began:.0f} s{self._time_left(now)}"
                    stage = self._stage[: _WIDTH - len(times)]
                    print(f"{_ERASE}{stage}{times}", end="", file=self._stream, flush=True)
                    self._shown = True

    def _time_left(self, now: float) -> str:
        left = self._pieces_end - now
        if self._pieces_end - self._pieces_began < _LONG or left < 1:
            return ""
        return f", about {left:.0f} s left" if left < 100 else f", about {left / 60:.0f} min left"


LINE = ProgressLine()
"""The progress line of this process."""


def stages_on_line() -> Stages:
    """The stages of a command, which the line names as they begin."""
    return Stages(LINE.tell)

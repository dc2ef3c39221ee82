"""The stages of a run: how long each took, and which one is running."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from modelexport.core.collected_messages import LOG

T = TypeVar("T")
_LISTENERS: list[Callable[[int, int], None]] = []
"""The one that is told of pieces of work comes last; nobody is told of pieces of a piece."""


def listen(listener: Callable[[int, int], None]) -> None:
    """Have a function called with the number of pieces of work that are done, and with that of all."""
    _LISTENERS[:] = [listener]


def with_progress(pieces: Sequence[T]) -> Iterator[T]:
    """Yield pieces of work that take about the same time, and tell how many are done."""
    listeners, _LISTENERS[:] = [*_LISTENERS], []
    try:
        for done, piece in enumerate(pieces):
            for listener in listeners:
                listener(done, len(pieces))
            yield piece
    finally:
        for listener in listeners:
            listener(0, 0)
            listen(listener)


class Stages:
    """Times stages: ``with stages("capture"): ...``.

    Args:
        progress: Called with the name of each stage as it begins.
    """

    def __init__(self, progress: Callable[[str], None] = lambda stage: None) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress

    def tell(self, detail: str) -> None:
        """Report a detail of the running stage."""
        self._progress(detail)

    def within(self, name: str) -> Stages:
        """Separate stages for a part of the work, reported with the part's name as a prefix."""
        return Stages(lambda stage: self.tell(f"{name}: {stage}"))

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self._progress(stage)
        LOG.info("%s", stage)
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = time.perf_counter() - began

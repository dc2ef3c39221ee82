"""The stages of a run: how long each took, and which one is running."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from modelexport.core.collected_messages import LOG


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

"""Runs of a model, kept for the next file of it: many files of one model are verified with one run of each kind."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class KeptRuns:
    """What one model gives for one set of inputs. The model and the inputs have to stay as they are meanwhile."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was made under a key; made now, if it was not."""
        if key not in self._kept:
            self._kept[key] = make()
        made: T = self._kept[key]
        return made

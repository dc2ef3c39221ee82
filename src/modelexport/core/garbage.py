"""Restricts Python's garbage collector to new objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_FULL = 25
"""The least number of smaller collections between two full ones inside the block."""


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Exclude the existing objects from garbage collection inside the block, and collect rarely.

    Torch and its libraries keep a million objects alive, and each full collection looks at all of them: a fifth of an
    export of 24 layers. Nothing is done in a program that froze objects itself.
    """
    if gc.get_freeze_count():
        yield
        return
    youngest, young, full = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(youngest, young, max(full, _FULL))
    try:
        yield
    finally:
        gc.set_threshold(youngest, young, full)
        gc.unfreeze()

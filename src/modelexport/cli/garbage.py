"""Keeps Python's garbage collector to what a piece of work makes itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Inside: the collector does not look at the objects that were there before.

    Torch and its libraries keep a million objects alive, and one look at all of them takes as long as a fifth of a
    small model's export. What is made inside is collected as ever. A program that froze objects itself is left alone.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

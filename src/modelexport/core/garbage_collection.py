"""Restricts Python's garbage collector to new objects."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_FULL = 50
"""The least number of smaller collections between two full ones inside a block."""
_YOUNG = 10_000
"""The least number of new objects between two collections inside a block: of Python's 700 nearly all are still used."""
_GROWTH = 1.25
"""How many times the objects of the last full collection there may be at the start of a block: Python's own rule."""


class Heap:
    """How many objects the garbage collector tracked when it last looked at all of them."""

    counted = 0
    """How many there were after the first block, or after the last full collection at the start of one."""
    blocks = 0
    """The blocks of memory that Python had allocated when objects were counted last. It counts blocks in no time."""
    frozen = False
    """Whether objects are frozen, in an open block or by the program: Python counts them as long as a model runs."""


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Exclude the existing objects from garbage collection inside the block, and collect rarely.

    Torch and its libraries keep a million objects alive, and each full collection looks at all of them: a fifth of an
    export of 24 layers. What became garbage since is collected at the start of a block, as soon as it may be much.
    Nothing is done in a program that froze objects itself, and inside another such block.
    """
    if not Heap.frozen and gc.isenabled() and gc.get_freeze_count():
        Heap.frozen = True
    if Heap.frozen or not gc.isenabled():
        yield
        return
    gc.freeze()
    Heap.frozen = True
    grown = sys.getallocatedblocks() - Heap.blocks > (_GROWTH - 1) * Heap.counted
    if Heap.counted and grown:
        if gc.get_freeze_count() > _GROWTH * Heap.counted:
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            Heap.counted = gc.get_freeze_count()
        Heap.blocks = sys.getallocatedblocks()
    youngest, young, before = gc.get_threshold()
    gc.set_threshold(max(youngest, _YOUNG), young, max(before, _FULL))
    try:
        yield
    finally:
        Heap.frozen = False
        gc.set_threshold(youngest, young, before)
        if not Heap.counted:  # the first block has imported what it needs
            gc.freeze()
            Heap.counted, Heap.blocks = gc.get_freeze_count(), sys.getallocatedblocks()
        gc.unfreeze()

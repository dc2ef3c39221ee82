"""Work in a process that is killed, or whose limits are changed, and begins as a copy of this one.

Work that imports or computes much belongs in a process that is started (``multiprocessing``'s ``spawn``): the copy has
locks and sessions of threads that it does not have.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

OUTSIDE = 99
"""The status of a child that something else ended."""


def in_child(work: Callable[[], int]) -> int:
    """Run in a separate process that may be killed; returns its status from ``os.waitpid``."""
    return os.waitpid(forked(work, lambda: (os.fork(), 0))[0], 0)[1]


def forked(work: Callable[[], int], fork: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    """Run in a separate process, whose status is what is returned; returns what ``fork`` does, first the process.

    A session of ONNX Runtime waits for its threads when it is deleted, which a forked process does not have: sessions
    that nobody holds are deleted before, and all others are not looked at again, here or there.
    """
    gc.collect()
    gc.freeze()
    child, other = fork()
    if child == 0:
        try:
            os._exit(work())
        finally:
            os._exit(OUTSIDE)
    return child, other

"""Work that a signal must not cut in two, such as cleaning up after one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside: signals that a Python function handles wait until the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    numbers = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
    before = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    try:
        for number in before:
            signal.signal(number, lambda number, frame: waiting.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        with suppress(IndexError):
            signal.raise_signal(waiting[0])

"""Work in a thread of its own, for code outside of Python that takes long: the runtime's, which lets others run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begun(work: Callable[[], T]) -> Future[T]:
    """Start some work; its result, or what it raises, is in the future. It does not keep the program from ending."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done

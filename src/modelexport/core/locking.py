"""One piece of work at a time: what exporters, tracing and warnings change is the state of the whole process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

EXCLUSIVE = threading.RLock()
"""Held by whatever runs or captures a model, or replaces warnings and loggers. A thread may take it again."""


def exclusive(function: Callable[P, T]) -> Callable[P, T]:
    """A function that no two threads run at the same time; the others wait."""

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        with EXCLUSIVE:
            return function(*args, **kwargs)

    return alone

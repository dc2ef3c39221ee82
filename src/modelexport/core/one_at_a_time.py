"""A lock around exports, traces and warning filters, which change the state of the whole process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

EXCLUSIVE = threading.RLock()
"""Held while a model is run or captured, or while warnings and loggers are replaced. Reentrant."""


def exclusive(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that only one thread runs it at a time; other threads wait."""

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        with EXCLUSIVE:
            return function(*args, **kwargs)

    return alone

"""Warnings that name the line of the caller of this package, not a line inside it."""

from __future__ import annotations

import sys
import warnings
from types import FrameType


def warn_caller(text: str, category: type[Warning]) -> None:
    """Warn of something in the line that called this package."""
    level, frame = 1, sys._getframe(0).f_back
    while frame is not None and _is_inside(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level + 1)


def _is_inside(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("modelexport", "contextlib", "functools")

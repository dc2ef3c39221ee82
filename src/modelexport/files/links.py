"""A file under a second name, without copying its bytes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

_FICLONE = 0x40049409
"""The Linux ioctl that makes a file share the blocks of another until one of them is written to."""


def clone_or_link(source: Path, target: Path) -> Literal["clone", "hard link"]:
    """Make ``target`` a clone of ``source`` where the file system supports it, otherwise a hard link.

    Raises:
        OSError: The file system supports neither.
    """
    if clone(source, target):
        return "clone"
    os.link(source, target)
    return "hard link"


def clone(source: Path, target: Path) -> bool:
    """Make ``target`` a file that shares the blocks of ``source``; returns whether the file system supports it."""
    if sys.platform != "linux":
        return False
    import fcntl

    with source.open("rb") as old, target.open("wb") as new:
        try:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        except OSError:
            target.unlink()
            return False
    return True

"""Staging folders of runs that were killed: told from those in use by a lock, and removed."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import IO

from modelexport.core.limits import ABANDONED_SECONDS

try:
    import fcntl
except ImportError:  # not on Windows: what a killed run left stays there
    fcntl = None  # type: ignore[assignment]  # mypy knows the module of its own system only

STAGING_PREFIX = ".modelexport-"
_LOCK = ".lock"


def locked(folder: Path) -> IO[bytes] | None:
    """Take the lock of a folder; ``None`` if another process holds it or the system does not have file locks."""
    if fcntl is None:
        return None
    try:
        file = (folder / _LOCK).open("ab")
    except OSError:
        return None
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def remove_abandoned(directory: Path) -> None:
    """Remove the staging folders of runs that were killed, here and in the folders here, which packages go to."""
    for folder in (*directory.glob(f"{STAGING_PREFIX}*"), *directory.glob(f"*/{STAGING_PREFIX}*")):
        if folder.is_symlink() or not folder.is_dir():
            continue
        with contextlib.suppress(OSError):
            # A folder without a lock was made a moment ago, or by a run that was killed before it could lock it.
            if not (folder / _LOCK).exists() and time.time() - folder.stat().st_mtime < ABANDONED_SECONDS:
                continue
            lock = locked(folder)
            if lock is not None:
                with lock:
                    shutil.rmtree(folder, ignore_errors=True)

"""Locks that the system releases when a process ends: of staging folders, and of folders that files are moved into."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from modelexport.core.limits import ABANDONED_SECONDS, LOCK_SECONDS
from modelexport.errors import NotWrittenError
from modelexport.files.ordered_moves import restore

try:
    import fcntl
except ImportError:  # not on Windows: what a killed run left stays there
    fcntl = None  # type: ignore[assignment]  # mypy knows the module of its own system only

STAGING_PREFIX = ".modelexport-"
_LOCK = ".lock"


def locked(folder: Path, *, new: bool = False) -> IO[bytes] | None:
    """Take the lock of a folder; ``None`` if another process holds it or the system does not have file locks.

    Args:
        new: The folder was just made: others must not see the lock before it is taken.
    """
    if fcntl is None:
        return None
    lock = folder / (f"{_LOCK}.new" if new else _LOCK)
    try:
        file = lock.open("ab")
    except OSError:
        return None
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.rename(folder / _LOCK)
    except OSError:
        file.close()
        return None
    return file


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Inside, no other command moves files into a folder. The lock leaves no file, and ends with the process."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > end:
                    raise NotWrittenError(
                        f"another command is writing files in {folder}, and nothing was written: run this one again"
                    ) from error
                time.sleep(0.02)
            except OSError:  # a file system without locks
                break
            else:
                break
        yield
    finally:
        os.close(descriptor)


def remove_abandoned(directory: Path) -> None:
    """Remove the staging folders of runs that were killed, here and in the folders here, which packages go to.

    What such a run had moved out of the way is put back first (:func:`~modelexport.files.ordered_moves.restore`).
    """
    if fcntl is None:
        return
    folders: list[Path] = []
    for pattern in (f"{STAGING_PREFIX}*", f"*/{STAGING_PREFIX}*"):
        with contextlib.suppress(OSError):  # a folder goes while it is looked into, as in /tmp
            folders += directory.glob(pattern)
    for folder in folders:
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():  # others may write in /tmp
                continue
            # A folder without a lock was made a moment ago, or by a run that was killed before it could lock it.
            if not (folder / _LOCK).exists() and time.time() - status.st_mtime < ABANDONED_SECONDS:
                continue
            lock = locked(folder)
            if lock is not None:
                with lock:
                    with only_writer(folder.parent):
                        restore(folder)
                    remove_staging(folder)


def remove_staging(folder: Path) -> None:
    """Remove a staging folder, its lock last: if this is interrupted, the next run knows the rest by the lock."""
    for part in (folder / "before", folder / "new", folder):
        shutil.rmtree(part, ignore_errors=True)

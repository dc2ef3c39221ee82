"""Writing files so that a failed run leaves existing files unchanged; the next run undoes the moves of a killed one."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import IO

from modelexport.core.warned_callers import warn_caller
from modelexport.errors import LeftoverWarning, NotWrittenError, OutputError
from modelexport.files.folder_locks import STAGING_PREFIX, locked, only_writer, remove_abandoned, remove_staging
from modelexport.files.ordered_moves import Move, Order, Staged, files_in, order_of
from modelexport.files.protected_inputs import check_kept, check_others_keep_weights, reading
from modelexport.files.regular_files import what_it_is
from modelexport.files.replaceable_files import check_writable, check_written_by_us
from modelexport.format.keys import DOCUMENT_SUFFIXES, RECIPE_SUFFIX

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_ROOM = (*NO_SPACE, errno.EFBIG, errno.EROFS)
"""Why a file cannot be written that another could be."""
WRITTEN: list[Path] = []
"""What this process has moved into place so far."""


class Replacement:
    """The files of :func:`replaced_together`, in staging folders beside their places until all are moved."""

    def __init__(self, stack: contextlib.ExitStack, reads: Iterable[Path]) -> None:
        self._stack = stack
        self._reads = list(reads)
        self.folders: list[Staged] = []

    def folder(self, directory: Path, *, make: bool = False, package: bool = False) -> Path:
        """A staging folder for files that will be moved to ``directory``, which is made first if asked for.

        Args:
            package: The files have a manifest. One that readers refuse is in its place while they are moved, so that a
                run that is killed leaves no package made of two; the files of the package before are removed.

        Raises:
            OutputError: The directory does not exist or cannot be written to.
        """
        if make and not directory.exists():
            try:
                directory.mkdir()
            except OSError as error:
                raise NotWrittenError(f"cannot make the folder {directory}: {error.strerror or error}") from error
            self._stack.push(lambda kind, *_: _remove_empty([directory]) if kind is not None else None)
        staging = self._stack.enter_context(scratch(directory))
        self.folders.append(Staged(staging, directory, package))
        return staging

    def drop(self) -> None:
        """Move nothing of what was written until now."""
        self.folders = []

    def commit(self) -> None:
        """Move the files.

        Raises:
            OSError: One cannot be moved; none was.
            OutputError: One would take the place of something that is read, that is not a regular file, that holds
                weights of a model that stays, or that the command was not asked to write.
            NotWrittenError: Another command is moving files into one of the folders.
        """
        with contextlib.ExitStack() as locks:
            for folder in sorted({os.path.realpath(staged.directory) for staged in self.folders}):
                locks.enter_context(only_writer(Path(folder)))
            self._move()

    def _move(self) -> None:
        for staged in self.folders:
            staged.check_asked()
        models = any(order_of(file) is Order.MODEL for staged in self.folders for file in staged.new())
        moves = sorted((move for staged in self.folders for move in staged.moves(models)), key=attrgetter("order"))
        gone = {move.target for move in moves if move.is_away}
        placed = [move for move in moves if not move.is_away]
        for move in placed:
            if (kind := what_it_is(move.target)) is not None:
                raise OutputError(
                    f"{move.target} is not a regular file but {kind}: it is not replaced; give another name"
                )
        for move in moves:
            if move.target.name.endswith((*DOCUMENT_SUFFIXES, RECIPE_SUFFIX)):
                check_written_by_us(move.target)
        with reading(self._reads):
            check_kept(move.target for move in moves)
        targets = [move.target for move in moves]
        check_others_keep_weights(targets, [target for target in targets if order_of(target) is Order.MODEL])
        new_folders: list[Path] = []
        undo: list[Move] = []
        try:
            for move in placed:
                if move.target.exists() and move.target not in gone:
                    try:
                        os.link(move.target, move.backup)
                    except OSError:  # links are not possible
                        shutil.copy2(move.target, move.backup)
            for move in moves:
                for folder in [above for above in reversed(move.target.parents) if not above.exists()]:
                    folder.mkdir()
                    new_folders.append(folder)
                undo.append(move)
                move.run()
        except BaseException:
            with undisturbed():
                for move in reversed(undo):
                    with contextlib.suppress(OSError):
                        move.undo()
                _remove_empty(reversed(new_folders))
            raise
        # A part of a package is written to the package's staging folder, which may still be removed.
        WRITTEN.extend(
            file
            for file in (move.target for move in placed)
            if not any(part.startswith(STAGING_PREFIX) for part in file.parts)
        )


@contextlib.contextmanager
def replaced_together(reads: Iterable[Path] = ()) -> Iterator[Replacement]:
    """Replaces a set of files, of one or several folders, together: all of them, or none.

    Args:
        reads: Files and folders of which nothing may be replaced, besides those that :func:`reading` was told.

    Raises:
        OutputError: They cannot be written.
    """
    with contextlib.ExitStack() as stack:
        replacement = Replacement(stack, reads)
        try:
            yield replacement
            replacement.commit()
        except BrokenPipeError:
            raise
        except OSError as error:
            written = [placed for staged in replacement.folders for placed in staged.new().items()]
            directory = next((staged.directory for staged in replacement.folders), Path())
            raise _explained(error, written, directory) from error


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _explained(error: OSError, written: Iterable[tuple[Path, Path]], directory: Path) -> OutputError:
    """One line for what went wrong.

    Args:
        written: Files in staging folders, each with its place.
        directory: The place, if there are none.
    """
    times = [(file.stat().st_mtime_ns, file, place) for file, place in written]
    _, file, target = max(times, default=(0, None, directory))
    reason = error.strerror or str(error)
    size = file.stat().st_size if file is not None else 0
    if error.errno in NO_SPACE:
        free = shutil.disk_usage(target if file is None else target.parent).free
        needed = f"it needs more than {size:,} bytes, and " if size else ""
        reason += f"; {needed}{free:,} bytes are free: make room, or write elsewhere"
    elif error.errno == errno.EFBIG:
        reason += f"; it needs more than {size:,} bytes: raise the limit (ulimit -f)"
    return NotWrittenError(f"cannot write {target}: {reason}")


@contextlib.contextmanager
def written_together(directory: Path, reads: Iterable[Path] = ()) -> Iterator[Path]:
    """A folder to write files into; they are moved into ``directory`` when the block ends without an exception.

    Args:
        reads: As :func:`replaced_together` has them.

    Raises:
        OutputError: The directory does not exist or cannot be written to, or the disk is full.
    """
    with replaced_together(reads) as replacement:
        yield replacement.folder(directory)


@contextlib.contextmanager
def scratch(directory: Path | None = None) -> Iterator[Path]:
    """Yield a folder that is removed after the block. Folders left by killed runs are removed too.

    A lock that the system releases when a process ends distinguishes folders in use from abandoned ones.

    Args:
        directory: Where the folder is; by default where the system has temporary files.

    Raises:
        OutputError: The folder cannot be made.
    """
    directory = directory or Path(tempfile.gettempdir())
    folder, lock = None, None
    try:
        try:
            remove_abandoned(directory)
            with undisturbed():
                folder = Path(tempfile.mkdtemp(dir=directory, prefix=STAGING_PREFIX))
        except OSError as error:
            raise NotWrittenError(f"cannot write to {directory}: {error.strerror or error}") from error
        lock = locked(folder, new=True)
        new = folder / "new"  # what is replaced goes beside it
        new.mkdir()
        yield new
    except OSError as error:
        if isinstance(error, BrokenPipeError) or folder is None:
            raise
        raise _explained(error, ((file, directory / file.name) for file in files_in(folder)), directory) from error
    finally:
        try:
            _remove(folder, lock)
        except BaseException:  # a signal that came just before: the next one is ignored
            _remove(folder, lock)
            raise


def _remove(folder: Path | None, lock: IO[bytes] | None) -> None:
    with undisturbed():
        if folder is not None:
            remove_staging(folder)
        if lock is not None:
            lock.close()
        if folder is not None and folder.exists():
            warn_caller(f"cannot remove {folder}, a folder of temporary files: remove it", LeftoverWarning)


def check_space(path: Path, size: int) -> None:
    """Raise before the work starts if the disk has too little space for a file.

    Raises:
        OutputError: The disk has less than ``size`` bytes left.
    """
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError:
        return
    place = next((above.parent for above in path.parents if above.name.startswith(STAGING_PREFIX)), path.parent)
    if size > free:
        raise NotWrittenError(
            f"cannot write {place / path.name}: it needs {size:,} bytes and {free:,} are free: make room, or write "
            "elsewhere"
        )


def write_alone(path: Path, content: bytes) -> None:
    """Write a file that has nothing beside it.

    Raises:
        OutputError: It cannot be written. An existing file of that name is unchanged.
    """
    check_writable(path, alone=True)
    with written_together(path.parent) as staging:
        (staging / path.name).write_bytes(content)


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

"""Writing files so that a failed run leaves existing files unchanged."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from modelexport.core.limits import ABANDONED_SECONDS
from modelexport.errors import FileFormatError, OutputError
from modelexport.files.regular import what_it_is
from modelexport.format.keys import DATA_SUFFIX, DESCRIBING_SUFFIXES, DOCUMENT_SUFFIXES, REPORT_SUFFIX

try:
    import fcntl
except ImportError:  # not on Windows: files left by a killed run stay there
    fcntl = None  # type: ignore[assignment]  # a module has no optional type

_PREFIX = ".modelexport-"
_LOCK = ".lock"
_NEW, _BEFORE = "new", "before"
"""The subfolders of a staging folder for the new files and for the files that they replace."""


class Replacement:
    """Replaces a set of files together: all of them, or none.

    The files are written to staging folders beside their targets. When the block ends without an exception they are
    moved into place; if one of them cannot be moved, the earlier moves are undone.
    """

    def __init__(self) -> None:
        self._folders: list[tuple[Path, Path]] = []
        self._made: list[Path] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        done = False
        try:
            with self._stack:
                if kind is None:
                    try:
                        self._commit()
                    except OSError as failure:
                        raise self._explained(failure) from failure
                    done = True
                elif isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
                    raise self._explained(error) from error
        finally:
            for folder in [] if done else reversed(self._made):
                with contextlib.suppress(OSError):
                    folder.rmdir()

    def folder(self, directory: Path, *, make: bool = False) -> Path:
        """A staging folder for files that will be moved to ``directory``, which ``make`` creates first.

        Raises:
            OutputError: The directory does not exist or cannot be written to.
        """
        if make and not directory.exists():
            try:
                directory.mkdir()
            except OSError as error:
                raise OutputError(f"cannot make the folder {directory}: {error.strerror or error}") from error
            self._made.append(directory)
        staging = self._stack.enter_context(scratch(directory))
        self._folders.append((staging, directory))
        return staging

    def _commit(self) -> None:
        moves = [
            (file, directory / file.relative_to(staging), staging.parent / _BEFORE / str(number))
            for staging, directory in self._folders
            for number, file in enumerate(sorted(_files(staging)))
        ]
        for _, target, _ in moves:
            if (kind := what_it_is(target)) is not None:
                raise OutputError(f"{target} is not a regular file but {kind}: it is not replaced; give another name")
        stale = [
            (old, staging.parent / _BEFORE / f"stale{number}")
            for staging, directory in self._folders
            for number, old in enumerate(_stale(staging, directory))
        ]
        for staging, _ in self._folders:
            (staging.parent / _BEFORE).mkdir()
        made: list[Path] = []
        undo: list[tuple[Path, Path | None]] = []
        try:
            for target, before in [(target, before) for _, target, before in moves if target.exists()]:
                _keep(target, before)
            for file, target, before in moves:
                for folder in [above for above in reversed(target.parents) if not above.exists()]:
                    folder.mkdir()
                    made.append(folder)
                undo.append((target, before if before.exists() else None))
                os.replace(file, target)  # noqa: PTH105 - the name says that it replaces
            for old, before in stale:
                undo.append((old, before))
                os.replace(old, before)  # noqa: PTH105
        except BaseException:
            _take_back(undo, {target: file for file, target, _ in moves})
            for folder in reversed(made):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise

    def _explained(self, error: OSError) -> OutputError:
        """The error as one line: the file, the reason, and the space that it needs if the disk is full."""
        written = [
            (file.stat().st_mtime_ns, file, directory / file.relative_to(staging))
            for staging, directory in self._folders
            for file in _files(staging)
        ]
        _, file, target = max(written, default=(0, None, self._folders[0][1] if self._folders else Path()))
        reason = error.strerror or str(error)
        size = file.stat().st_size if file is not None else 0
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(target.parent).free
            reason += f"; it needs more than {size:,} bytes, and {free:,} are free: make room, or write elsewhere"
        elif error.errno == errno.EFBIG:
            reason += f"; it needs more than {size:,} bytes: raise the limit (ulimit -f)"
        return OutputError(f"cannot write {target}: {reason}")


def _keep(target: Path, before: Path) -> None:
    """Keep a file that will be replaced under a second name: a hard link, or a copy if links are not possible."""
    try:
        os.link(target, before)
    except OSError:
        shutil.copy2(target, before)


def _take_back(undo: Iterable[tuple[Path, Path | None]], staged: dict[Path, Path]) -> None:
    for target, before in reversed(list(undo)):
        with contextlib.suppress(OSError):
            if before is not None:
                if before.exists():
                    os.replace(before, target)  # noqa: PTH105
            elif target in staged and not staged[target].exists():
                target.unlink()


def _files(staging: Path) -> Iterator[Path]:
    return (file for file in staging.rglob("*") if file.is_file())


def _stale(staging: Path, directory: Path) -> Iterator[Path]:
    """Files that describe a model that is replaced but are not replaced themselves."""
    for model in _files(staging):
        if model.suffix != ".onnx":
            continue
        inside = model.relative_to(staging)
        beside = [inside.with_suffix(suffix) for suffix in DESCRIBING_SUFFIXES]
        if (directory / inside).exists():
            beside += [inside.with_suffix(REPORT_SUFFIX), inside.with_name(inside.name + DATA_SUFFIX)]
        for file in beside:
            if not (staging / file).exists() and (directory / file).is_file():
                yield directory / file


@contextlib.contextmanager
def written_together(directory: Path) -> Iterator[Path]:
    """Yield a folder to write files into; they are moved to ``directory`` when the block ends without an exception.

    Raises:
        OutputError: The directory does not exist or cannot be written to, or the disk is full.
    """
    with Replacement() as replacement:
        yield replacement.folder(directory)


@contextlib.contextmanager
def scratch(directory: Path) -> Iterator[Path]:
    """Yield a folder in ``directory`` that is removed after the block. Folders left by killed runs are removed too.

    A lock that the system releases when a process ends distinguishes folders in use from abandoned ones.

    Raises:
        OutputError: The folder cannot be made.
    """
    try:
        remove_abandoned(directory)
        folder = Path(tempfile.mkdtemp(dir=directory, prefix=_PREFIX))
    except OSError as error:
        raise OutputError(f"cannot write to {directory}: {error.strerror or error}") from error
    lock = None
    try:
        lock = _locked(folder)
        new = folder / _NEW
        new.mkdir()
        yield new
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock.close()


def _locked(folder: Path) -> IO[bytes] | None:
    """Take the lock of a folder; ``None`` if another process holds it or the system has no locks."""
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
    """Remove the staging folders of runs that were killed."""
    for folder in directory.glob(f"{_PREFIX}*"):
        if folder.is_symlink() or not folder.is_dir():
            continue
        with contextlib.suppress(OSError):
            # A folder without a lock is either just being created, or left by a run that was killed before locking it.
            if not (folder / _LOCK).exists() and time.time() - folder.stat().st_mtime < ABANDONED_SECONDS:
                continue
            lock = _locked(folder)
            if lock is not None:
                with lock:
                    shutil.rmtree(folder, ignore_errors=True)


def check_space(path: Path, size: int) -> None:
    """Fail before the work when there is no space for a file.

    Raises:
        OutputError: The disk has less than ``size`` bytes left, or the process may not write a file of that size.
    """
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError:
        return
    place = next((above.parent for above in path.parents if above.name.startswith(_PREFIX)), path.parent)
    if size > free:
        raise OutputError(
            f"cannot write {place / path.name}: it needs {size:,} bytes and {free:,} are free: make room, or write "
            "elsewhere"
        )
    try:
        import resource
    except ImportError:
        return
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit not in (resource.RLIM_INFINITY, -1) and size > limit:
        raise OutputError(
            f"cannot write {place / path.name}: it needs {size:,} bytes and the limit for a file is {limit:,} "
            "(ulimit -f): raise it"
        )


def check_writable(path: Path, reads: Iterable[Path] = ()) -> None:
    """Fail before the work when ``path`` cannot be written or writing it would destroy an input.

    Args:
        path: The file to write. Documents and a data file may be written beside it.
        reads: The files that the command reads, including the weights files of an ONNX file.

    Raises:
        OutputError: The folder does not exist or cannot be written to; ``path`` is not a regular file, has the name of
            another model's file, or is an input; or a file that would be written beside it belongs to an input.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a folder: give the name of a file in it")
    if path.is_symlink():
        raise OutputError(f"{path} is a symbolic link: give the file that it points to, {os.path.realpath(path)}")
    if (kind := what_it_is(path)) is not None:
        raise OutputError(f"{path} is not a regular file but {kind}: give the name of a file")
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"cannot write {path}: no permission to write in {path.parent}")
    belongs = next((end for end in (f".onnx{DATA_SUFFIX}", *DOCUMENT_SUFFIXES) if path.name.endswith(end)), None)
    if belongs is not None:
        raise OutputError(f"{path} has a name reserved for files beside a model (*{belongs}): give another name")
    for file in _beside(path):
        if (kind := what_it_is(file)) is not None:
            raise OutputError(f"{file} is not a regular file but {kind}, and would have to be replaced: remove it")
    check_apart(path, reads)


def check_apart(path: Path, reads: Iterable[Path]) -> None:
    """Fail if writing ``path`` and the files beside it would destroy an input.

    Raises:
        OutputError: An input would be destroyed.
    """
    there = [file for file in (path, *_beside(path)) if file.exists()]
    for read in reads if there else ():
        _check_apart(path, there, read)


def _beside(path: Path) -> list[Path]:
    return [path.with_name(path.name + DATA_SUFFIX), *map(path.with_suffix, DOCUMENT_SUFFIXES)]


def _check_apart(path: Path, there: Iterable[Path], read: Path) -> None:
    """Refuse to write ``path`` and the existing files beside it if that would replace a part of an input."""
    from modelexport.files.linked import data_files  # slow to import, and rarely needed

    if not read.is_file():
        return
    try:
        data = data_files(read) if read.suffix not in (".safetensors", ".json", ".py") else ()
    except FileFormatError:  # whoever reads it reports what is wrong
        data = ()
    parts = [read, *(part for part in data if part.is_file())]
    for file in there:
        for part in parts:
            if file.samefile(part):
                if file == path:
                    what = "the file to read" if part == read else f"a file with weights of {read}"
                    raise OutputError(f"{path} is {what}: give another name")
                raise OutputError(f"{path} would replace {file}, which holds weights of {read}: give another name")
    documents = [document for document in map(read.with_suffix, DOCUMENT_SUFFIXES) if document.is_file()]
    if taken := next((file for file in there for document in documents if file.samefile(document)), None):
        raise OutputError(f"{path} would replace {taken}, which belongs to {read}: give another name")

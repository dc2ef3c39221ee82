"""Writing files so that a failed run leaves existing files unchanged."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from modelexport.core.interrupts import undisturbed
from modelexport.errors import OutputError
from modelexport.files.abandoned import STAGING_PREFIX, locked, remove_abandoned
from modelexport.files.manifests import files_of_package, unfinished_manifest
from modelexport.files.protected import being_read, check_kept, parts_of, reading
from modelexport.files.regular import check_folder_writable, what_it_is
from modelexport.format.keys import DATA_SUFFIX, DESCRIBING_SUFFIXES, DOCUMENT_SUFFIXES, REPORT_SUFFIX
from modelexport.format.packages import MANIFEST

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_ROOM = (*NO_SPACE, errno.EFBIG, errno.EROFS)
"""Why a file cannot be written that another could be."""
_written: list[Path] = []
_NEW, _BEFORE = "new", "before"
"""The subfolders of a staging folder for the new files and for the files that they replace."""


def written_files() -> list[Path]:
    """What this process has moved into place so far."""
    return list(_written)


@dataclass(frozen=True)
class _Staged:
    """A staging folder, where its files go, and whether they are a package, which its manifest holds together."""

    staging: Path
    directory: Path
    package: bool

    @property
    def before(self) -> Path:
        return self.staging.parent / _BEFORE

    @property
    def manifest(self) -> Path:
        return self.directory / MANIFEST

    def files(self) -> list[Path]:
        """The new files in the order in which they are moved: a manifest is the last."""
        manifest = self.staging / MANIFEST
        return sorted(_files(self.staging), key=lambda file: (self.package and file == manifest, file))

    def stale(self) -> list[Path]:
        """What is there, describes what is replaced, and is not replaced itself."""
        former = files_of_package(self.directory) if self.package else []
        new = {self.directory / file.relative_to(self.staging) for file in _files(self.staging)}
        return list(dict.fromkeys(file for file in (*former, *_stale(self.staging, self.directory)) if file not in new))


@dataclass(frozen=True)
class _Move:
    file: Path
    target: Path
    before: Path
    """The second name that what was there gets."""


class Replacement:
    """Replaces a set of files together: all of them, or none.

    They are written to staging folders beside their places. When the block ends without an exception they are moved;
    if one of them cannot be, those that were moved are taken back.

    Args:
        reads: Files and folders of which nothing may be replaced, besides those that :func:`reading` was told.
    """

    def __init__(self, reads: Iterable[Path] = ()) -> None:
        self._reads = list(reads)
        self._folders: list[_Staged] = []
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
                raise OutputError(f"cannot make the folder {directory}: {error.strerror or error}") from error
            self._made.append(directory)
        staging = self._stack.enter_context(scratch(directory))
        self._folders.append(_Staged(staging, directory, package))
        return staging

    def _commit(self) -> None:
        moves = [
            _Move(file, staged.directory / file.relative_to(staged.staging), staged.before / str(number))
            for staged in self._folders
            for number, file in enumerate(staged.files())
        ]
        for move in moves:
            if (kind := what_it_is(move.target)) is not None:
                raise OutputError(
                    f"{move.target} is not a regular file but {kind}: it is not replaced; give another name"
                )
        stale = [
            _Move(old, old, staged.before / f"stale{number}")
            for staged in self._folders
            for number, old in enumerate(staged.stale())
        ]
        with reading(self._reads):
            check_kept(move.target for move in (*moves, *stale))
        for staged in self._folders:
            staged.before.mkdir()
        seals = {staged.manifest for staged in self._folders if staged.package}
        # What is read first is written last.
        last = [move for move in moves if move.target in seals]
        unfinished = [self._unfinished(staged) for staged in self._folders if staged.package]
        moves = [*unfinished, *(move for move in moves if move.target not in seals)]
        made: list[Path] = []
        undo: list[_Move] = []
        try:
            for move in (*moves, *last):
                if move.target.exists():
                    _keep(move.target, move.before)
            for move in moves:
                for folder in [above for above in reversed(move.target.parents) if not above.exists()]:
                    folder.mkdir()
                    made.append(folder)
                undo.append(move)
                move.file.replace(move.target)
            for move in stale:
                undo.append(move)
                move.file.replace(move.before)
            for move in last:
                undo.append(move)
                move.file.replace(move.target)
        except BaseException:
            with undisturbed():
                _take_back(undo)
                for folder in reversed(made):
                    with contextlib.suppress(OSError):
                        folder.rmdir()
            raise
        # A part of a package is written to the package's staging folder, which may still be removed.
        _written.extend(
            move.target
            for move in (*moves, *last)
            if not any(part.startswith(STAGING_PREFIX) for part in move.target.parts)
        )

    def _unfinished(self, staged: _Staged) -> _Move:
        """The manifest that is there while the files of a package are moved."""
        file = staged.staging.parent / "unfinished"
        names = [
            [path.relative_to(base).as_posix() for path in paths]
            for base, paths in (
                (staged.directory, files_of_package(staged.directory)),
                (staged.staging, staged.files()),
            )
        ]
        file.write_bytes(unfinished_manifest(*names))
        return _Move(file, staged.manifest, staged.before / "manifest")

    def _explained(self, error: OSError) -> OutputError:
        """The error as one line: the file, the reason, and the space that it needs if the disk is full."""
        written = [
            (file, staged.directory / file.relative_to(staged.staging))
            for staged in self._folders
            for file in _files(staged.staging)
        ]
        return _explained(error, written, self._folders[0].directory if self._folders else Path())


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


def _take_back(undo: Iterable[_Move]) -> None:
    for move in reversed(list(undo)):
        with contextlib.suppress(OSError):
            if move.before.exists():
                move.before.replace(move.target)
            elif not move.file.exists():
                move.target.unlink()


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
def written_together(
    directory: Path, reads: Iterable[Path] = (), *, make: bool = False, package: bool = False
) -> Iterator[Path]:
    """A folder to write files into; they are moved into ``directory`` when the block ends without an exception.

    Args:
        reads, make, package: As :class:`Replacement` has them.

    Raises:
        OutputError: The directory does not exist or cannot be written to, or the disk is full.
    """
    with Replacement(reads) as replacement:
        yield replacement.folder(directory, make=make, package=package)


@contextlib.contextmanager
def scratch(directory: Path) -> Iterator[Path]:
    """Yield a folder in ``directory`` that is removed after the block. Folders left by killed runs are removed too.

    A lock that the system releases when a process ends distinguishes folders in use from abandoned ones.

    Raises:
        OutputError: The folder cannot be made.
    """
    folder, lock = None, None
    try:
        try:
            remove_abandoned(directory)
            with undisturbed():
                folder = Path(tempfile.mkdtemp(dir=directory, prefix=STAGING_PREFIX))
        except OSError as error:
            raise OutputError(f"cannot write to {directory}: {error.strerror or error}") from error
        lock = locked(folder)
        new = folder / _NEW
        new.mkdir()
        yield new
    except OSError as error:
        if isinstance(error, BrokenPipeError) or folder is None:
            raise
        raise _explained(error, ((file, directory / file.name) for file in _files(folder)), directory) from error
    finally:
        try:
            _remove(folder, lock)
        except BaseException:  # a signal that came just before: the next one is ignored
            _remove(folder, lock)
            raise


def _remove(folder: Path | None, lock: IO[bytes] | None) -> None:
    with undisturbed():
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock.close()


def check_space(path: Path, size: int) -> None:
    """Raise before the work starts if the disk has too little space for a file.

    Raises:
        OutputError: The disk has less than ``size`` bytes left, or the process may not write a file of that size.
    """
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError:
        return
    place = next((above.parent for above in path.parents if above.name.startswith(STAGING_PREFIX)), path.parent)
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


def check_writable(path: Path, reads: Iterable[Path] = (), *, alone: bool = False) -> None:
    """Fail before the work when ``path`` cannot be written or writing it would destroy an input.

    Args:
        path: The file to write. Documents and a data file may be written beside it.
        reads: The files that the command reads, including the weights files of an ONNX file.
        alone: Nothing is written beside it: it is a page or a table, which may have the name of a model.

    Raises:
        OutputError: The folder does not exist or cannot be written to; ``path`` is not a regular file, has the name of
            another model's file, or is an input; or a file that would be written beside it belongs to an input.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a folder: give the name of a file in it")
    if path.is_symlink():
        raise OutputError(
            f"{path} is a symbolic link: give the file that it points to, {os.path.realpath(path)}, or "
            "--follow-symlinks"
        )
    if (kind := what_it_is(path)) is not None:
        raise OutputError(f"{path} is not a regular file but {kind}: give the name of a file")
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no folder {path.parent}")
    check_folder_writable(path.parent, path)
    belongs = next((end for end in (f".onnx{DATA_SUFFIX}", *DOCUMENT_SUFFIXES) if path.name.endswith(end)), None)
    if belongs is not None:
        raise OutputError(f"{path} has a name reserved for files beside a model (*{belongs}): give another name")
    for file in () if alone else _beside(path):
        if (kind := what_it_is(file)) is not None:
            raise OutputError(f"{file} is not a regular file but {kind}, and would have to be replaced: remove it")
    check_apart(path, reads, alone=alone)


def check_apart(path: Path, reads: Iterable[Path], *, alone: bool = False) -> None:
    """Fail if writing ``path`` and the files beside it would destroy an input.

    Raises:
        OutputError: An input would be destroyed.
    """
    there = [file for file in (path, *(() if alone else _beside(path))) if file.exists()]
    for read in dict.fromkeys((*reads, *being_read())) if there else ():
        for part, what in parts_of(read):
            if (file := next((file for file in there if file.samefile(part)), None)) is None:
                continue
            if file == path and what != "document":
                told = "the file to read" if part == read else f"a file of {read}"
                told = f"a file with weights of {read}" if what == "weights" else told
                raise OutputError(f"{path} is {told}: give another name")
            holds = "holds weights of" if what == "weights" else "belongs to"
            raise OutputError(f"{path} would replace {file}, which {holds} {read}: give another name")


def _beside(path: Path) -> list[Path]:
    return [path.with_name(path.name + DATA_SUFFIX), *map(path.with_suffix, DOCUMENT_SUFFIXES)]

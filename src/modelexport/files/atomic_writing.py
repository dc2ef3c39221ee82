"""Writing files so that a failed run leaves existing files unchanged.

It is longer than other files because the order of the moves, what undoes them, and what signals may not interrupt
are one argument: split, nobody could check that no mixture of old and new files is left at any of its steps.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum, auto
from operator import attrgetter
from pathlib import Path
from typing import IO

from modelexport.errors import LeftoverWarning, NotWrittenError, OutputError
from modelexport.files.folder_locks import STAGING_PREFIX, locked, only_writer, remove_abandoned
from modelexport.files.manifest_file import files_of_package, unfinished_manifest
from modelexport.files.protected_inputs import being_read, check_kept, parts_of, reading
from modelexport.files.regular_files import check_folder_writable, what_it_is
from modelexport.format.keys import DATA_SUFFIX, DESCRIBING_SUFFIXES, DOCUMENT_SUFFIXES
from modelexport.format.package_manifest import MANIFEST

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_ROOM = (*NO_SPACE, errno.EFBIG, errno.EROFS)
"""Why a file cannot be written that another could be."""
WRITTEN: list[Path] = []
"""What this process has moved into place so far."""
_NEW, _BEFORE = "new", "before"
"""The subfolders of a staging folder for the new files and for the files that they replace."""


class _Order(IntEnum):
    """The order in which files are moved: a run that is killed leaves no set of old and new files.

    What describes a model goes away before it and comes after it. A model whose weights lie beside it goes away before
    them and comes after them; another one takes the place of the old one.
    """

    UNFINISHED = auto()
    """A manifest that readers refuse."""
    OLD_DOCUMENT = auto()
    OLD_MODEL = auto()
    OLD = auto()
    NEW = auto()
    MODEL = auto()
    DOCUMENT = auto()
    MANIFEST = auto()


_AWAY = (_Order.OLD_DOCUMENT, _Order.OLD_MODEL, _Order.OLD)


@dataclass(frozen=True)
class _Move:
    order: _Order
    file: Path
    target: Path
    before: Path
    """The second name that what was there gets."""

    def run(self) -> None:
        if self.order not in _AWAY and self.file.stat().st_nlink == 1:  # a link has the mode of what it links to
            self.file.chmod(_ordinary_mode())  # safetensors writes files that nobody else may read
        self.file.replace(self.before if self.order in _AWAY else self.target)


def _ordinary_mode() -> int:
    """The permissions of a new file."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


@dataclass(frozen=True)
class _Staged:
    """A staging folder, where its files go, and whether they are a package, which its manifest holds together."""

    staging: Path
    directory: Path
    package: bool

    def new(self) -> dict[Path, Path]:
        """The new files to their places."""
        return {file: self.directory / file.relative_to(self.staging) for file in sorted(_files(self.staging))}

    def stale(self) -> list[Path]:
        """What belongs to something that is replaced, and is not replaced itself."""
        former = files_of_package(self.directory) if self.package else []
        return sorted({*former, *_stale(self.staging, self.directory)}.difference(self.new().values()))

    def check_asked(self) -> None:
        """Refuse files that are there and belong neither to a model that is written nor to a package that is replaced.

        Raises:
            OutputError: One would be replaced.
        """
        new = self.new()
        stems = {target.with_suffix("") for target in new.values() if _kind(target) is _Order.MODEL}
        if not stems:  # each file is what the command was asked to write
            return
        former = {self.directory / MANIFEST, *files_of_package(self.directory)} if self.package else set()
        for file, target in new.items():
            named = any(target.parent == stem.parent and target.name.startswith(f"{stem.name}.") for stem in stems)
            if not named and target not in former and target.exists() and not target.samefile(file):
                raise OutputError(f"{target} is there, and does not belong to what is written: give another folder")

    def moves(self, models: bool) -> list[_Move]:
        """What has to be moved; makes the folder for what was there.

        Args:
            models: Models are among all files that are moved; else each file takes the place of the old one.
        """
        new, stale, manifest = self.new(), self.stale(), self.directory / MANIFEST
        has_weights = any(_kind(file) is _Order.NEW for file in (*new.values(), *stale))
        found = []
        replaced = [target for target in new.values() if models and target.exists()]
        for target in (*stale, *replaced):
            kind = _kind(target)
            if self.package and target == manifest:
                continue
            if target in stale or kind is _Order.DOCUMENT or has_weights:
                found.append((_OLD[kind], target, target))
        for file, target in new.items():
            found.append((_Order.MANIFEST if self.package and target == manifest else _kind(target), file, target))
        if self.package:
            unfinished = self.staging.parent / "unfinished"
            files = [file.relative_to(self.directory).as_posix() for file in (*stale, *new.values())]
            unfinished.write_bytes(unfinished_manifest(files))
            found.append((_Order.UNFINISHED, unfinished, manifest))
        before = self.staging.parent / _BEFORE
        before.mkdir()
        return [_Move(*move, before / str(number)) for number, move in enumerate(found)]


_OLD = {_Order.DOCUMENT: _Order.OLD_DOCUMENT, _Order.MODEL: _Order.OLD_MODEL, _Order.NEW: _Order.OLD}


def _kind(file: Path) -> _Order:
    if file.suffix == ".onnx":
        return _Order.MODEL
    return _Order.DOCUMENT if file.name.endswith((*DOCUMENT_SUFFIXES, ".json")) else _Order.NEW


class Replacement:
    """The files of :func:`replaced_together`, in staging folders beside their places until all are moved."""

    def __init__(self, stack: contextlib.ExitStack, reads: Iterable[Path]) -> None:
        self._stack = stack
        self._reads = list(reads)
        self.folders: list[_Staged] = []

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
        self.folders.append(_Staged(staging, directory, package))
        return staging

    def commit(self) -> None:
        """Move the files.

        Raises:
            OSError: One cannot be moved; none was.
            OutputError: One would take the place of something that is read, that is not a regular file, or that the
                command was not asked to write.
            NotWrittenError: Another command is moving files into one of the folders.
        """
        with contextlib.ExitStack() as locks:
            for folder in sorted({os.path.realpath(staged.directory) for staged in self.folders}):
                locks.enter_context(only_writer(Path(folder)))
            self._move()

    def _move(self) -> None:
        for staged in self.folders:
            staged.check_asked()
        models = any(_kind(file) is _Order.MODEL for staged in self.folders for file in staged.new())
        moves = sorted((move for staged in self.folders for move in staged.moves(models)), key=attrgetter("order"))
        gone = {move.target for move in moves if move.order in _AWAY}
        placed = [move for move in moves if move.order not in _AWAY]
        for move in placed:
            if (kind := what_it_is(move.target)) is not None:
                raise OutputError(
                    f"{move.target} is not a regular file but {kind}: it is not replaced; give another name"
                )
        with reading(self._reads):
            check_kept(move.target for move in moves)
        made: list[Path] = []
        undo: list[_Move] = []
        try:
            for move in placed:
                if move.target.exists() and move.target not in gone:
                    _keep(move.target, move.before)
            for move in moves:
                for folder in [above for above in reversed(move.target.parents) if not above.exists()]:
                    folder.mkdir()
                    made.append(folder)
                undo.append(move)
                move.run()
        except BaseException:
            with undisturbed():
                _take_back(undo)
                _remove_empty(reversed(made))
            raise
        # A part of a package is written to the package's staging folder, which may still be removed.
        targets = [move.target for move in placed]
        WRITTEN.extend(file for file in targets if not any(part.startswith(STAGING_PREFIX) for part in file.parts))


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
            written = [one for staged in replacement.folders for one in staged.new().items()]
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
        free = shutil.disk_usage(target.parent).free
        reason += f"; it needs more than {size:,} bytes, and {free:,} are free: make room, or write elsewhere"
    elif error.errno == errno.EFBIG:
        reason += f"; it needs more than {size:,} bytes: raise the limit (ulimit -f)"
    return NotWrittenError(f"cannot write {target}: {reason}")


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
        if _kind(model) is not _Order.MODEL:
            continue
        inside = model.relative_to(staging)
        beside = [inside.with_suffix(suffix) for suffix in DESCRIBING_SUFFIXES]
        if (directory / inside).exists():
            beside += [inside.with_suffix(suffix) for suffix in DOCUMENT_SUFFIXES]
            beside.append(inside.with_name(inside.name + DATA_SUFFIX))
        for file in beside:
            if not (staging / file).exists() and (directory / file).is_file():
                yield directory / file


@contextlib.contextmanager
def written_together(
    directory: Path, reads: Iterable[Path] = (), *, make: bool = False, package: bool = False
) -> Iterator[Path]:
    """A folder to write files into; they are moved into ``directory`` when the block ends without an exception.

    Args:
        reads, make, package: As :func:`replaced_together` and :meth:`Replacement.folder` have them.

    Raises:
        OutputError: The directory does not exist or cannot be written to, or the disk is full.
    """
    with replaced_together(reads) as replacement:
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
            raise NotWrittenError(f"cannot write to {directory}: {error.strerror or error}") from error
        lock = locked(folder, new=True)
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
        if folder is not None and folder.exists():
            told = f"cannot remove {folder}, a folder of temporary files: remove it"
            warnings.warn(told, LeftoverWarning, stacklevel=2)


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


def write_alone(path: Path, content: bytes) -> None:
    """Write a file that has nothing beside it.

    Raises:
        OutputError: It cannot be written. An existing file of that name is unchanged.
    """
    check_writable(path, alone=True)
    with written_together(path.parent) as staging:
        (staging / path.name).write_bytes(content)


def check_apart(path: Path, reads: Iterable[Path], *, alone: bool = False) -> None:
    """Fail if writing ``path`` and the files beside it would destroy an input.

    Raises:
        OutputError: An input would be destroyed.
    """
    there = [file for file in (path, *(() if alone else _beside(path))) if file.exists()]
    for read in dict.fromkeys((*reads, *being_read())) if there else ():
        for part, what in parts_of(read):
            file = next((file for file in there if file.samefile(part)), None)
            if file == path and what != "document":
                held = "a file with weights of" if what == "weights" else "a file of"
                told = "the file to read" if part == read else f"{held} {read}"
                raise OutputError(f"{path} is {told}: give another name")
            if file is not None:
                holds = "holds weights of" if what == "weights" else "belongs to"
                raise OutputError(f"{path} would replace {file}, which {holds} {read}: give another name")


def _beside(path: Path) -> list[Path]:
    return [path.with_name(path.name + DATA_SUFFIX), *map(path.with_suffix, DOCUMENT_SUFFIXES)]


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

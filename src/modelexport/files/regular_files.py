"""Opening files that models name: only regular files of a limited size, without waiting for a writer."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from modelexport.core.limits import SETTINGS_BYTES
from modelexport.core.text import suggest
from modelexport.errors import FileFormatError, ModelExportError, NotWrittenError
from modelexport.files.named_models import BERT_TINY


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading, not a folder, FIFO, socket or device; symbolic links are followed."""
    try:
        # Opening a FIFO without this flag waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise FileFormatError(f"{path} is not a regular file but {_kind(mode)}: give a file")
    with os.fdopen(descriptor, "rb") as file:
        yield file


def check_exists(path: Path) -> None:
    """Refuse a path at which there is nothing, or nothing that can be looked at."""
    try:
        path.stat()
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError | ValueError) -> FileFormatError:
    if not isinstance(error, FileNotFoundError):
        return FileFormatError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}")
    if _MODEL.fullmatch(str(path)):
        return FileFormatError(f"{path} is a model, not a file: export it first: modelexport export {path} -o OUT.onnx")
    return FileFormatError(f"there is no file {path}{_near(path)}")


def _near(path: Path) -> str:
    """``; did you mean ...?`` with files of the folder that have a name like this."""
    with contextlib.suppress(OSError, ValueError):
        return suggest(path.name, [near.name for near in islice(path.parent.glob(f"*{path.suffix}"), _MOST_FILES)])
    return ""


_MODEL = re.compile(rf"{BERT_TINY}|(.+\.py|[a-zA-Z_]\w+(\.\w+)*):[a-zA-Z_]\w*")
"""The built-in model, or a factory in a file or an installed module."""
_MOST_FILES = 200
"""Files of a folder that are looked at for a name."""


def entry_of(path: Path) -> tuple[int, int, str] | None:
    """Which entry of which folder a path names; ``None`` if there is nothing."""
    try:
        path.lstat()
        folder = path.parent.stat()
    except (OSError, ValueError):
        return None
    return folder.st_dev, folder.st_ino, path.name


def read_regular(path: Path, limit: int) -> bytes:
    """The bytes of a file."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise FileFormatError(f"{path} has {size:,} bytes, and at most {limit:,} are read: it is damaged")
        try:
            return file.read(limit + 1)
        except OSError as error:
            raise FileFormatError(f"cannot read {path}: {error.strerror or error}") from error


def read_json(path: Path, error: type[ModelExportError], then: str) -> dict[str, Any]:
    """The object in a JSON file of settings.

    Args:
        error: The class of the error to raise.
        then: What to do about a file that cannot be read.
    """
    try:
        read = json.loads(read_regular(path, SETTINGS_BYTES))
    except FileFormatError as cause:  # it says what is wrong with the file
        raise error(f"{cause}; {then}") from cause
    except (ValueError, RecursionError) as cause:
        raise error(f"{path} cannot be read as JSON: {cause}; {then}") from cause
    if not isinstance(read, dict):
        raise error(f"{path} is not a JSON object: {then}")
    return read


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFLNK: "a symbolic link",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")


def is_file(path: Path) -> bool:
    """Whether a path leads to a regular file; a name that no file can have does not."""
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises where a name is too long


def what_it_is(path: Path) -> str | None:
    """The kind of file at a path, in words, if it is not a regular file; ``None`` if it is one or does not exist."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return None
    return None if stat.S_ISREG(mode) else _kind(mode)


def check_folder_writable(folder: Path, path: Path) -> None:
    """Fail where nothing can be written into a folder that is there.

    Raises:
        OutputError: ``path`` cannot be written, since the folder may not, or is on a read-only file system.
    """
    if not os.access(folder, os.W_OK):
        with contextlib.suppress(OSError, AttributeError):
            if os.statvfs(folder).f_flag & os.ST_RDONLY:
                raise NotWrittenError(f"cannot write {path}: {folder} is on a read-only file system: write elsewhere")
        raise NotWrittenError(f"cannot write {path}: no permission to write in {folder}")

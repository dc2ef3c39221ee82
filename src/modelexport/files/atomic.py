"""Writing files so that a run that fails leaves what was there."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from modelexport.errors import OutputError


@contextlib.contextmanager
def written_together(directory: Path) -> Iterator[Path]:
    """A folder to write files into; they are moved into ``directory`` when the block ends without an exception.

    Raises:
        OutputError: The directory is not there or cannot be written to, or the disk is full.
    """
    try:
        with tempfile.TemporaryDirectory(dir=directory, prefix=".modelexport-") as staging:
            yield Path(staging)
            for file in sorted(Path(staging).rglob("*")):
                if file.is_file():
                    target = directory / file.relative_to(staging)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(file, target)  # noqa: PTH105 - says what matters: it replaces
    except OSError as error:
        raise OutputError(f"cannot write to {directory}: {error.strerror or error}") from error


def check_writable(path: Path) -> None:
    """Fail before the work, not after it, when ``path`` cannot be written.

    Raises:
        OutputError: The folder is not there or cannot be written to, or ``path`` is a folder.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a folder: give the name of a file in it")
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"cannot write {path}: no permission to write in {path.parent}")

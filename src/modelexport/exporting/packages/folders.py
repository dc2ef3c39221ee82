"""The folder of a package: checked before the export, replaced as a whole after it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modelexport.errors import OutputError
from modelexport.format.packages import MANIFEST


def check_package_folder(folder: Path, directory: Path | None = None) -> None:
    """Fail before the work when a package cannot be written.

    Raises:
        OutputError: Its parent does not exist, or it is a file, holds something other than a package, or is the model's
            folder.
    """
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise OutputError(f"cannot write {folder}: there is no folder {parent}")
    if directory is not None and folder.exists() and folder.resolve() == directory.resolve():
        raise OutputError(f"{folder} is the folder of the model: give another one")
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file: give the name of a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).is_file():
        raise OutputError(f"{folder} holds other files: give the name of an empty or a new folder")


@contextmanager
def replaced_whole(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into; it replaces ``folder`` when the block ends without an exception."""
    parent = folder.absolute().parent
    try:
        staging = Path(tempfile.mkdtemp(dir=parent, prefix=".modelexport-"))
    except OSError as error:
        raise OutputError(f"cannot write to {parent}: {error.strerror or error}") from error
    try:
        yield staging
        former = Path(f"{staging}-former")
        if folder.exists():
            os.replace(folder, former)  # noqa: PTH105 - the name says that it replaces
        mode = os.umask(0)
        os.umask(mode)
        staging.chmod(0o777 & ~mode)
        os.replace(staging, folder)  # noqa: PTH105
        shutil.rmtree(former, ignore_errors=True)
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)

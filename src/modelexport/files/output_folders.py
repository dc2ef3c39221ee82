"""The folder that a package is written to: checked before the work."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from modelexport.errors import OutputError
from modelexport.files.folder_locks import STAGING_PREFIX
from modelexport.files.manifest_file import files_of_package, read_kind
from modelexport.files.protected_inputs import being_read, check_kept, check_others_keep_weights, reading
from modelexport.files.regular_files import check_folder_writable, what_it_is
from modelexport.format.package_manifest import MANIFEST, UNFINISHED


def check_output_folder(folder: Path) -> None:
    """Fail before the work, not after it, when files cannot be written into a folder, which may have to be made."""
    if folder.is_symlink():
        raise OutputError(
            f"{folder} is a symbolic link: give the folder that it leads to, {os.path.realpath(folder)}, or "
            "--follow-symlinks"
        )
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file: give the name of a folder")
    if not folder.absolute().parent.is_dir():
        raise OutputError(f"cannot write {folder}: there is no folder {folder.absolute().parent}")
    place = folder if folder.is_dir() else folder.absolute().parent
    check_folder_writable(place, folder)


def check_package_folder(folder: Path, reads: Iterable[Path] = (), kinds: Collection[str] = ()) -> None:
    """Fail before the work, not after it, when a package cannot be written to a folder.

    Args:
        folder: It may have a package, whose files are replaced; other files stay if there is one.
        reads: The files and folders that are read, besides those that are known to be.
        kinds: The kinds of packages that may be replaced; any if left out.

    Raises:
        OutputError: It cannot be written to, or holds something else than a package, files that are read, or weights of
            another model.
    """
    check_output_folder(folder)
    if not folder.is_dir():
        return
    for read in (*reads, *being_read()):
        if read.is_dir() and read.samefile(folder):
            raise OutputError(f"{folder} is the folder of the model: give another one")
    if any(not file.name.startswith(STAGING_PREFIX) for file in folder.iterdir()):
        kind = read_kind(folder)
        if kind is None:
            raise OutputError(f"{folder} holds other files: give the name of an empty or a new folder")
        if kinds and kind not in (*kinds, UNFINISHED):
            raise OutputError(f"{folder} holds a package of the kind '{kind}': give an empty or a new folder")
    files = [folder / MANIFEST, *files_of_package(folder, every=True)]
    for file in files:
        if (what := what_it_is(file)) is not None:
            raise OutputError(f"{file} is not a regular file but {what}, and may have to be replaced: remove it")
    # An earlier package of the same checkpoint has hard links to its weights, which may be replaced.
    with reading(reads):
        check_kept(files)
    check_others_keep_weights(files, [file for file in files if file.suffix == ".onnx"])

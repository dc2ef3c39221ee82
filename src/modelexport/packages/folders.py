"""The folder of a package, copied."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from modelexport.files.abandoned import STAGING_PREFIX
from modelexport.format.packages import MANIFEST, Manifest, encode_manifest


def copy_folder(folder: Path, target: Path) -> None:
    """Copy the regular files of a folder into another, symbolic links to them as files; what else is there is left.

    A file that is there under several names (weights of several parts) is one in the copy as well.
    """
    copied: dict[tuple[int, int], Path] = {}
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        if file.is_file() and not inside.parts[0].startswith(STAGING_PREFIX):
            (target / inside).parent.mkdir(parents=True, exist_ok=True)
            status = file.stat()
            first = copied.setdefault((status.st_dev, status.st_ino), target / inside)
            if first != target / inside and _linked(first, target / inside):
                continue
            shutil.copy2(file, target / inside)


def write_manifest(manifest: Manifest, staging: Path) -> None:
    """Write the manifest of the files in a staging folder."""
    files = (file.relative_to(staging).as_posix() for file in staging.rglob("*") if file.is_file())
    names = sorted(name for name in files if name != MANIFEST)
    (staging / MANIFEST).write_bytes(encode_manifest(msgspec.structs.replace(manifest, files=names)))


def _linked(first: Path, second: Path) -> bool:
    """Give a file a second name; returns whether the file system can."""
    try:
        os.link(first, second)
    except OSError:
        return False
    return True

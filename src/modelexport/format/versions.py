"""The version of the format, and the check of a file's version."""

from __future__ import annotations

from pathlib import Path

from modelexport.errors import FileFormatError

FORMAT_VERSION = "2026-11-26"
"""The version that is written, and the only one that is read."""


def check_version(path: Path, version: str | None) -> None:
    """Refuse a model with tags that this version cannot read.

    Args:
        version: The format version of the model; ``None`` if it has no tags.

    Raises:
        FileFormatError: The format version is unknown.
    """
    if version not in (None, FORMAT_VERSION):
        raise unknown_version(path, version)


def unknown_version(path: Path, version: str) -> FileFormatError:
    """The error for a file whose format version this version of modelexport cannot read."""
    return FileFormatError(
        f"{path} has format version {version}, and this version of modelexport reads {FORMAT_VERSION}: "
        "export it again, or use the version that wrote it"
    )

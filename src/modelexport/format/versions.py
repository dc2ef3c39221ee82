"""The version of the format, the versions that are read, and the check of a file's version."""

from __future__ import annotations

from pathlib import Path

from modelexport.errors import FileFormatError

FORMAT_VERSION = "2026-11-26"
"""2026-11-26: calls have ``class_name`` and ``level`` in ``modelexport.call_tree``; with the encoding ``functions``,
names of the flat graph follow from modules (``modelexport.names`` and ``modelexport.shapes`` are gone).
2026-11-22: properties of initializers are in their tensors; ``modelexport.carrier`` is now
``modelexport.encoding``; ``NAME.vectors.safetensors`` is ``NAME.reference.safetensors``; nodes have ``layer_ann``.
2026-11-21: first version."""

READ_VERSIONS = frozenset({FORMAT_VERSION, "2026-11-22", "2026-11-21"})
"""Versions that this version of modelexport reads."""


def check_version(path: Path, version: str | None) -> None:
    """Refuse a model with tags that this version cannot read.

    Args:
        version: The format version of the model; ``None`` if it has no tags.

    Raises:
        FileFormatError: The format version is unknown.
    """
    if version is not None and version not in READ_VERSIONS:
        raise unknown_version(path, version)


def unknown_version(path: Path, version: str) -> FileFormatError:
    """The error for a file whose format version this version of modelexport cannot read."""
    return FileFormatError(
        f"{path} has format version {version}, and this version of modelexport reads "
        f"{' and '.join(sorted(READ_VERSIONS))}: "
        "export it again, or use the version that wrote it"
    )

"""The version of the format, the versions that are read, and the check of a file's version."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from modelexport.errors import FileFormatError
from modelexport.format.keys import FORMAT_VERSION_KEY

FORMAT_VERSION = "2026-11-26"
"""2026-11-26: calls have ``class_name`` and ``level`` in ``modelexport.call_tree``; with the encoding ``functions``,
names of the flat graph follow from modules (``modelexport.names`` and ``modelexport.shapes`` are gone).
2026-11-22: properties of initializers are in ``TensorProto.metadata_props``; ``modelexport.carrier`` is now
``modelexport.encoding``; ``NAME.vectors.safetensors`` is ``NAME.reference.safetensors``; nodes have ``layer_ann``.
2026-11-21: first version."""

READ_VERSIONS = frozenset({FORMAT_VERSION, "2026-11-22", "2026-11-21"})
"""Versions that this version of modelexport reads."""


def check_version(path: Path, properties: Mapping[str, str]) -> None:
    """Refuse a model with tags that this version cannot read.

    Raises:
        FileFormatError: The format version of the model is unknown.
    """
    version = properties.get(FORMAT_VERSION_KEY)
    if version is not None and version not in READ_VERSIONS:
        raise unknown_version(path, version)


def unknown_version(path: Path, version: str) -> FileFormatError:
    """The error for a file whose format version this version of modelexport cannot read."""
    return FileFormatError(
        f"{path} has format version {version}, and this version of modelexport reads "
        f"{' and '.join(sorted(READ_VERSIONS))}: "
        "export it again, or use the version that wrote it"
    )

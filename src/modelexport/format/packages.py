"""``modelexport.json``, the manifest of a folder of several graphs. Only data."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

MANIFEST = "modelexport.json"

PACKAGE_VERSION = "2026-11-23"
"""2026-11-23: first version."""

Kind = Literal["generate", "pipeline", "stages", "whole"]
UNFINISHED: Final = "unfinished"
"""The kind of the manifest that is there while the files of a package are moved; readers refuse it."""


class PartEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One graph of a package."""

    name: str
    file: str
    """Relative to the folder."""
    module: str
    """The address of the module that the part runs; empty for the whole model."""
    inputs: list[str]
    outputs: list[str]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parts of a package, in the order in which they run, and the files that hold their weights."""

    format_version: str
    kind: Kind | Literal["unfinished"]
    parts: list[PartEntry]
    weights: list[str]
    """Relative to the folder."""
    files: list[str] = []
    """All files that were written with it, relative to the folder: those that the next run may replace or remove."""


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest in the folder's format."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"

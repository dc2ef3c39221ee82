"""``modelexport.json``, the manifest of a folder of several graphs. Only data."""

from __future__ import annotations

from typing import Literal

import msgspec

MANIFEST = "modelexport.json"

PACKAGE_VERSION = "2026-11-23"
"""2026-11-23: first version."""

Kind = Literal["generate", "pipeline", "stages", "whole"]


class PartEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One graph of a package."""

    name: str
    file: str
    """Relative to the folder."""
    module: str
    """The address of the module that the part runs; empty for the whole model."""
    inputs: list[str]
    outputs: list[str]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a package, in the order in which they run, and the files that hold their weights."""

    format_version: str
    kind: Kind
    parts: list[PartEntry]
    weights: list[str]
    """Relative to the folder."""


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest in the folder's format."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"

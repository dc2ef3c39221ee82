"""``modelexport.json``, the manifest of a folder of several graphs. Only data."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

MANIFEST = "modelexport.json"

PACKAGE_VERSION = "2026-11-23"
"""2026-11-23: first version."""

UNFINISHED: Final = "unfinished"
"""The kind of the manifest that is there while the files of a package are moved; readers refuse it."""


class PartEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One graph of a package."""

    name: str
    file: str
    """Relative to the folder."""
    module: str
    """The address of the module that the part runs; empty for the whole model."""
    inputs: list[str]
    outputs: list[str]
    method: str = ""
    """What a part that a person named runs: a method of the model, or of a module in it. Empty for a function."""
    returns: list[str] = []
    """The names that were given to what it returns."""
    constants: dict[str, Any] = {}
    """Arguments without tensors: numbers, texts, and lists of them."""
    state: dict[str, str] = {}
    """Outputs, and the inputs of this part that take them in the next run."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The value of a state before the first token: zeros."""

    dtype: str
    shape: list[int | str]
    """``batch`` is the number of rows."""


Rows = Literal["padded", "equal", "one"]
"""Prompts of different lengths, padded on the left; of one length; one prompt only."""


class Generation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the parts of a package generate text, so that a loop needs nothing else."""

    tokens: str
    """The input with the new tokens, ``[batch, tokens]``."""
    first: str
    """The part that runs first on tokens."""
    step: str
    """The part that runs on the tokens after those; often the same."""
    rows: Rows = "padded"
    """Which prompts a batch may have."""
    one_by_one: list[str] = []
    """The parts of these two that take one token at a time, those of the prompt included."""
    before: list[str] = []
    """The parts that run once, before the first token, in this order."""
    embedding: str = ""
    """The part that runs before each of ``first`` and ``step`` on the same tokens."""
    state: dict[str, str] = {}
    """Outputs, and the inputs that take them in the next run."""
    start: dict[str, Start] = {}
    """The inputs of ``first`` that no part makes before it."""
    mask: str = ""
    """The input that has 1 for every token so far, the new ones included, and 0 for padding: ``[batch, tokens]``."""
    positions: str = ""
    """The input with the positions of the new tokens: the ones in the mask before a token, 0 for padding."""
    position_axes: int = 0
    """How many times the positions are repeated on a first axis; 0 if they have none."""
    cache_position: str = ""
    """The input with the places of the new tokens in a cache of fixed size: those of the mask."""
    cache_size: int = 0
    """The number of places of such a cache, which is the length of the mask as well, filled with 0."""
    restart_after: int = 0
    """If a text gets longer than this number of tokens, all of them run again from ``start``; 0 for never."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parts of a package, in the order in which they run, and the files that hold their weights."""

    format_version: str
    kind: str
    """``generate``, ``pipeline``, ``parts``, ``stages``, ``whole``, one that another package adds, or
    ``unfinished``."""
    parts: list[PartEntry]
    weights: list[str]
    """Relative to the folder."""
    generation: Generation | None = None
    """How the parts run, if they generate text."""
    files: list[str] = []
    """All files that were written with it, relative to the folder: those that the next run may replace or remove."""


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest in the folder's format."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"

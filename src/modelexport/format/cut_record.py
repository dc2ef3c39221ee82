"""``modelexport.cut_from``: which call of which file a model was cut out of,
and what its inputs and outputs are there.
"""

from __future__ import annotations

import msgspec


class CutValue(msgspec.Struct, frozen=True):
    """An input or output of a model that was cut out of a file."""

    value: str
    """The name of its value in the file."""
    tensor: str | None = None
    """The name of the argument or the result of the call that it is; empty if it is neither, or in another layout, and
    ``None`` if the file had no sidecar, or one that does not tell."""


class CutRecord(msgspec.Struct, frozen=True):
    """Where a model was cut out."""

    call: str
    """The address of the call."""
    file: str
    """The name of the file, without its folder."""
    inputs: list[CutValue]
    """The required inputs, in their order."""
    outputs: list[CutValue]
    """The outputs, in their order."""

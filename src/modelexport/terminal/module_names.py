"""The modules of a stage as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


def modules_text(whole: Sequence[str], parts_of: Sequence[str]) -> str:
    """The first and last complete module of a stage, and the modules of which it has a part."""
    text = whole[0] if len(whole) == 1 else f"{whole[0]} to {whole[-1]}" if whole else ""
    parts = ", ".join(name for name in parts_of if name != ".")
    return f"{text}{f' (part of {parts})' if parts else ''}".strip()

"""Help with a name that is not there."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def nearest(name: str, known: Collection[str]) -> str:
    """``; did you mean ...?`` with up to three names like ``name``, or nothing."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""

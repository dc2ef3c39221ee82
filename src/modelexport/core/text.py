"""Text in columns and numbers with their nouns: what all that is shown to a person is made of."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def indent(depth: int, text: str) -> str:
    return "  " * depth + text


def align(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """The rows with their columns under one another; the columns in ``right`` are set flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3].rpartition(',')[0]}, ..."


def nearest(name: str, known: Collection[str]) -> str:
    """``; did you mean ...?`` with up to three names like ``name``, or nothing."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""

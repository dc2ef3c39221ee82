"""Rewriting the arguments of a command line before they are parsed."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SPEC = re.compile(r"[A-Za-z_]\w*(,[A-Za-z_]\w*)+|.+:\d+=[A-Za-z_]\w*")


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """A command line in which ``--dynamic`` with a value is replaced by ``--axes``: a flag cannot take a value."""
    made: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word.startswith("--dynamic="):
            made += ["--axes", word.removeprefix("--dynamic=")]
        elif word == "--dynamic" and words and _SPEC.fullmatch(words[0]):
            made += ["--axes", words.pop(0)]
        else:
            made.append(word)
    return made

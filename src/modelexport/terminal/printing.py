"""How commands print results: as text or as JSON, of a file or of the parts of a package, on what kind of screen."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from modelexport.core.text import plural

T = TypeVar("T")
_LEAST_LINES = 24
_OTHER_LINES = 6
"""Lines of a screen that something else than the tree needs: the prompt, the heading, the summary."""
_MARK = f"\x00{os.urandom(6).hex()}:"
"""Begins a style, until the text is written to a terminal; no name in a file can contain it by intention."""
Style = Literal["bold", "dim", "red", "green", "yellow"]
_STYLES: dict[Style, int] = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33}


def print_json(document: Any) -> None:
    """Print a value as a JSON document."""
    import msgspec

    print(json.dumps(msgspec.to_builtins(document), indent=1))


def print_result(document: Any, text: Callable[[], str], *, as_json: bool) -> None:
    """Print a result as a JSON document, or as the text for a person."""
    if as_json:
        print_json(document)
    else:
        print(text())


def print_parts(results: Mapping[str, T], text: Callable[[T], str], *, as_json: bool) -> None:
    """Print the result for a file, which is under an empty name, or those for the parts of a package by name."""
    texts = {name: text(result) for name, result in results.items()} if not as_json else {}
    print_result(document_of_parts(results), lambda: format_headings(texts), as_json=as_json)


def document_of_parts(results: Mapping[str, Any]) -> Any:
    """The result for a file, which is under an empty name, or those for the parts of a package under ``parts``."""
    return results.get("", {"parts": results})


def format_headings(texts: Mapping[str, str]) -> str:
    """The text of each part under its name; for a single file, without a name."""
    return "\n\n".join(f"{name}:\n{text}" if name else text for name, text in texts.items())


def wants_colour() -> bool:
    """Whether standard output is a terminal that shows colours, and nobody said no."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, style: Style, *, colour: bool | None = None) -> str:
    """Text in a style, by default if standard output shows any; :func:`rendered` makes it one of the terminal's."""
    wanted = wants_colour() if colour is None else colour
    return f"{_MARK}{_STYLES[style]}m{text}{_MARK}0m" if text and wanted else text


def rendered(text: str, escape: Callable[[str], str]) -> str:
    """Text with its styles as the terminal takes them, and everything else escaped."""
    if _MARK not in text:
        return escape(text)
    first, *rest = text.split(_MARK)
    parts = [part.partition("m") for part in rest]
    return escape(first) + "".join(f"\x1b[{code}m{escape(shown)}" for code, _, shown in parts)


def fitting_depth(depths: Sequence[int], depth: int | None) -> int | None:
    """How many levels to show: as asked for, or the most whose rows fit on the screen; ``None`` for all.

    Args:
        depths: The level of each row.
    """
    if depth is not None or not sys.stdout.isatty():
        return depth
    room = max(shutil.get_terminal_size().lines, _LEAST_LINES) - _OTHER_LINES
    levels = sorted(set(depths))
    fits = [level for level in levels if sum(row_depth <= level for row_depth in depths) <= room]
    return max(fits[-1] if fits else 0, levels[min(1, len(levels) - 1)]) if len(depths) > room else None


def left_out(depths: Sequence[int], depth: int | None) -> str:
    """A line that says how to see the rows that are not shown; nothing if all are, or if that was asked for."""
    if depth is None or not (more := sum(row_depth > depth for row_depth in depths)):
        return ""
    return f"{plural(more, 'row')} further inside not shown: --depth {max(depths)} shows all"


def command_line(*words: object) -> str:
    """A command to type, with names quoted where a shell needs it."""
    return f"modelexport {shlex.join(map(str, words))}"


def next_steps(*steps: str) -> str:
    """A line that says what to type, or to do, after a command."""
    return f"next: {'; '.join(steps)}"

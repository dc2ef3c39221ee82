"""Helpers for shown text: columns, numbers with nouns, safe and shortened names."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from pathlib import Path, PurePath
from typing import Any

_HIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
    r"|[\U000e0000-\U000e007f]"
)
"""Control characters except tabs and line ends, characters that change the direction of text, invisible characters and
lone surrogates: they can move the cursor, hide text, or make one name look like another."""


def printable(text: str) -> str:
    """Text that is safe to show: characters that could control the terminal are replaced by escapes."""
    return _HIDDEN.sub(lambda match: ascii(match.group())[1:-1], text)


def on_one_line(text: str) -> str:
    """A name without characters that a terminal would act on; line ends and tabs are escaped, too."""
    return printable(text).replace("\t", "\\t").replace("\n", "\\n")


_HARMLESS = re.compile(r"(?:[\w .,:;+()…%/='-]|->)*")
"""Text that Markdown shows unchanged: it contains no link, picture, tag or mention."""


def as_code(text: str) -> str:
    """A name in Markdown as code, also in a table: nothing in it is taken for Markdown."""
    shown = on_one_line(text).replace("|", "\\|")
    ticks = "`" * (max((len(run) for run in re.findall("`+", shown)), default=0) + 1)
    space = " " if len(ticks) > 1 else ""
    return f"{ticks}{space}{shown}{space}{ticks}"


def as_markdown(text: str) -> str:
    """Text in Markdown: as code where something in it could be taken for Markdown."""
    return text if _HARMLESS.fullmatch(text) else as_code(text)


_PATH = re.compile(
    r"(?<![\w./\\-])"
    r"(?:(?:file://)?(?P<root>/[\w.@+~-]+)(?:/[\w.@+~ -]*[\w.@+~-])*/|[A-Za-z]:\\(?:[^\s\\:*?\"<>|]+\\)*)"
    r"(?P<name>[\w.@+~-]+)"
)


def text_without_paths(text: str) -> str:
    """Text of an exporter with each absolute path shortened to its last part.

    A tag begins with a slash as well; only text that begins with an existing folder is taken for a path.
    """

    def shortened_path(match: re.Match[str]) -> str:
        root = match["root"]
        return match["name"] if root is None or Path(root).is_dir() else match.group()

    return _PATH.sub(shortened_path, text)


def plural(count: int, noun: str, verb: str = "") -> str:
    """``1 node``, ``2 nodes``; with ``that are``: ``1 node that is``, ``2 nodes that are``."""
    if count == 1 and verb:
        before, space, last = verb.rpartition(" ")
        verb = before + space + _OF_ONE.get(last, f"{last}s")
    return f"{count:,} {noun}{'' if count == 1 else 's'}{verb and f' {verb}'}"


_OF_ONE = {"are": "is", "were": "was", "have": "has", "cross": "crosses"}


def percent_text(share: float) -> str:
    """``1.25 %``, or ``1.3e-06`` for a share that is hardly any."""
    if share >= 10:
        return f"{100 * share:,.0f} %"
    return f"{100 * share:.3g} %" if share >= 1e-5 or not share else f"{share:.1e}"


def indent(depth: int, text: str) -> str:
    return "  " * depth + text


def align(rows: Sequence[Sequence[object]], right: Collection[int] = ()) -> str:
    """The rows as text with aligned columns; those in ``right`` and those with integers are right-aligned."""
    right = {*right, *(index for row in rows for index, cell in enumerate(row) if isinstance(cell, int))}
    texts = [[on_one_line(f"{cell:,}" if isinstance(cell, int) else str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in texts
    )


def shortened(text: str, width: int) -> str:
    """A text, or so much of it as fits: a list ends with a whole entry if most of it does."""
    if len(text) <= width:
        return text
    begin = text[: width - 4]
    entries = begin.rpartition(",")[0]
    return f"{entries}, ..." if len(entries) > width // 2 else f"{begin.rstrip()} ..."


def first_few(names: Iterable[object], most: int = 5) -> str:
    """``a, b and 7 more``."""
    texts = [str(name) for name in names]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def rest_of(listed: Sized, most: int) -> list[str]:
    """A line that counts what a list of at most so many does not show; no line if it shows all."""
    return [f"  and {len(listed) - most:,} more; --json lists all"] if len(listed) > most else []


def short_repr(result: Any) -> str:
    """A result on one line, of collections only their length: ``Split(path='stages', by='bytes', stages: 3)``."""
    import dataclasses  # which is slow to import

    names = getattr(result, "__struct_fields__", None) or [field.name for field in dataclasses.fields(result)]
    shown = []
    for name in (*names, *(["agrees"] if hasattr(result, "agrees") else [])):
        value = getattr(result, name)
        if isinstance(value, str | int | float | Path):
            text = str(value) if isinstance(value, Path) else value
            shown.append(f"{name}={text[:_LONGEST_TEXT]!r}" if isinstance(text, str) else f"{name}={text}")
        elif isinstance(value, Sized) and len(value):
            shown.append(f"{name}: {len(value):,}")
    return f"{type(result).__name__}({', '.join(shown)})"


_LONGEST_TEXT = 80
"""Characters of a text that a short ``repr`` shows."""


def error_line(error: BaseException | None, limit: int = 240) -> str:
    """An exception's type and message, on one line that fits a screen."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    return text if len(text) <= limit else f"{text[:limit]}..."


def reason_of(error: BaseException, limit: int = 600) -> str:
    """The message of an exception of a library on one line; its type if it has none."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


def bytes_text(count: int) -> str:
    """``90.9 MB``, or ``512 bytes``."""
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else plural(count, "byte")


def name_of_code(file: str) -> str:
    """The name of a file of code, without its folder; ``In[3]`` for a cell of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    cell: tuple[str, str] | None = shell.compile.format_code_name(file) if shell is not None else None
    return cell[1] if cell is not None else PurePath(file).name


_MOST_BEGUN = 5
"""Names with the same beginning that a line lists; of more it lists the likeliest."""


def suggest(name: str, known: Collection[str], *, beginning: str = "") -> str:
    """``; did you mean ...?`` with the names that begin with ``name``, else up to three like it, or nothing.

    Args:
        beginning: What is written before each name.
    """
    begun = [full for full in known if name and full.startswith(name)]
    near = begun if 0 < len(begun) <= _MOST_BEGUN else difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(beginning + full for full in near)}?" if near else ""


def chained(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and, one after the other, its cause or context, the cause or context of that one, and so on.

    Each comes once: an exception that is raised while one that it caused is handled leads back to itself.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def raised_first(error: BaseException) -> BaseException:
    """The exception that an exception was raised from, and its own origin in turn."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def root_cause(error: BaseException) -> str:
    """The first line of the exception that an exception was raised from."""
    first = raised_first(error)
    lines = str(first).strip().splitlines()
    return f"{type(first).__name__}: {lines[0] if lines else 'no reason given'}"

"""Tables of figures as text: a tree with bars, CSV."""

from __future__ import annotations

import csv
import io
import shutil
import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from modelexport.core.text import align, indent, plural
from modelexport.tables.columns import sorted_by
from modelexport.terminal.printing import Style, styled, wants_colour

if TYPE_CHECKING:
    from pathlib import Path

    from modelexport.core.calls import ModuleCall
    from modelexport.core.selectors import Selection
    from modelexport.tables.columns import Column
    from modelexport.tables.html_page import Section
    from modelexport.tables.table import By, FigureRow, Table

BAR = 12
"""The length of the longest bar, in characters."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_STEPS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_COLOURS: tuple[Style, ...] = ("green", "yellow", "red")


class Screen(NamedTuple):
    """What a table is written to."""

    colour: bool = False
    blocks: bool = True
    """Whether bars are block characters; otherwise ``#``, where the encoding has none."""
    width: int | None = None
    """How long a line may be: columns beyond it are left out, and named below the table."""

    @classmethod
    def here(cls) -> Screen:
        """Standard output."""
        blocks = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        return cls(wants_colour(), blocks, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)


def format_table(
    table: Table,
    main: str,
    *,
    by: By = "call",
    depth: int | None = None,
    only: Selection | None = None,
    sort: str | None = None,
    screen: Screen | None = None,
) -> str:
    """The table as an indented tree, or by address if sorted or selected, with a bar for each total of the main column.

    Args:
        main: The column of the bars and of the own figures, if the table is not sorted by another one.
        sort: A column, whose own figures come first and have the bars, or its totals, ``total.seconds``.
        screen: What is written to, by default a file.
    """
    screen = screen or Screen()
    rows = table.rows(by, depth=depth, only=only)
    flat = sort is not None or by == "class" or (only is not None and by == "call")
    rows = table.sorted(rows, sort) if sort is not None else rows
    column, side = sorted_by(table.columns, sort or f"total.{main}")
    most = max(_number(column, figures.get(column.name)) for figures in (table.whole, *(row.total for row in rows)))
    columns = [shown for shown in table.shown if any(row.total.get(shown.name) for row in rows)]
    titles = [_title(column, "TOTAL"), "", _title(column, "OWN")]
    header = ["MODULE", *(["CALLS"] if by != "call" else []), *(titles if side == "total" else reversed(titles))]
    header += [
        _title(other, "OWN" if other.share and side == "own" else "") for other in columns if other is not column
    ]
    lines_of_table: list[tuple[str, str, Mapping[str, Any], Mapping[str, Any]]] = []
    for row in rows:
        name = row.address.removeprefix("class:") or "." if flat else indent(row.depth, row.tag.rpartition("/")[2])
        lines_of_table.append((name, f"{len(row.calls):,}", row.own, row.total))
    lines_of_table += [(name, "", {}, figures) for name, figures in table.outside_rows if only is None]
    body, bars = [], []
    for name, calls, alone, total in lines_of_table:
        if any(total.values()):
            barred = alone if side == "own" and calls else total
            bars.append(share := _number(column, barred.get(column.name)) / most if most else 0.0)
            figures = [_cell(column, of_side.get(column.name)) for of_side in (total, alone)]
            first, second = figures if side == "total" else reversed(figures)
            others = (_cell(c, (barred if c.share else total).get(c.name)) for c in columns if c is not column)
            body.append([name, *([calls] if by != "call" else []), first, _bar(share, screen.blocks), second, *others])
    if not body:
        return "\n".join(["no module has figures in this table", *table.notes])
    right = set(range(1, len(header))) - {header.index("")}
    cut = _fitting([header, *body], screen.width, least=header.index("") + 2)
    lines = align([cells[:cut] for cells in (header, *body)], right=right).splitlines()
    if screen.colour:
        colours = [_COLOURS[(share >= 0.1) + (share >= 0.5)] for share in bars]
        lines[1:] = [styled(line, style, colour=True) for line, style in zip(lines[1:], colours, strict=True)]
    hidden = len(rows) - len([row for row in rows if any(row.total.values())])
    below = [f"{plural(hidden, 'row')} without figures not shown"] if hidden else []
    if cut < len(header):
        below.append(f"not shown, the window is too narrow: {', '.join(header[cut:]).lower()}; --csv shows all")
    return "\n".join([*lines, "", *below, *table.notes]).rstrip()


def _fitting(rows: Sequence[Sequence[str]], width: int | None, *, least: int) -> int:
    """How many columns fit in a line, two spaces between them, and not fewer than ``least``."""
    ends = list(accumulate(max(map(len, column)) + 2 for column in zip(*rows, strict=True)))
    return max(least, sum(width is None or end - 2 <= width for end in ends))


def format_csv(tables: Mapping[str, tuple[Table, Sequence[FigureRow]]]) -> str:
    """Tables as CSV: address, tag, class, depth, then ``own.`` and ``total.`` of each column; what is outside last.

    Those of the parts of a package, by name, have the name before the address.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    several = "" not in tables
    names = list(dict.fromkeys(column.name for table, _ in tables.values() for column in table.shown))
    sides = [f"{side}.{name}" for name in names for side in ("own", "total")]
    writer.writerow([*(["part"] if several else []), "address", "tag", "class", "depth", *sides])
    for part, (table, rows) in tables.items():
        first = [part] if several else []
        for row in rows:
            figures = _numbers(table, names, row.own, row.total)
            writer.writerow([*first, row.address, row.tag, row.class_name, row.depth, *figures])
        for name, outside in table.outside_rows:
            writer.writerow([*first, name, "", "", "", *_numbers(table, names, outside, outside)])
    return text.getvalue()


def show_errors(
    table: Table,
    errors: Mapping[ModuleCall, float] | None,
    html: Path | None,
    sections: Sequence[Section] = (),
    *,
    as_csv: bool,
) -> None:
    """Write a table with the errors of calls, if it has none yet, to a page, and print it as CSV."""
    from modelexport.tables.columns import ERROR
    from modelexport.tables.html_page import Page, write_page

    table = table if errors is None else table.with_column(ERROR, errors)
    if html is not None:
        write_page(html, Page(table, ERROR.name, sections))
    if as_csv:
        print(format_csv({"": (table, table.rows())}), end="")


def _numbers(table: Table, names: Sequence[str], alone: Mapping[str, Any], total: Mapping[str, Any]) -> list[Any]:
    mine, inside = table.numbers(alone), table.numbers(total)
    return [side.get(name, "") for name in names for side in (mine, inside)]


def _title(column: Column, side: str) -> str:
    return " ".join(word for word in (column.name.replace("_", " ").upper(), side) if word)


def _number(column: Column, figure: Any) -> float:
    return float(column.number(figure)) if figure is not None else 0.0


def _bar(share: float, blocks: bool) -> str:
    if not blocks:
        return "#" * round(share * BAR)
    eighths = max(0, min(round(share * BAR * 8), BAR * 8))
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def _cell(column: Column, figure: Any) -> str:
    """A readable figure: ``1.23 M``, ``4.56 ms``, ``12.3 %``."""
    if figure is None:
        return ""
    number = column.number(figure)
    if column.name == "share":
        return f"{number:.1%}"
    if column.unit == "seconds":
        scale, unit = (1, "s") if abs(number) >= 1 else (1e3, "ms") if abs(number) >= 1e-3 else (1e6, "us")
        return f"{number * scale:,.3g} {unit}" if number else "0"
    if isinstance(number, float) and number != int(number):
        return f"{number:.3g}"
    least, letter = next((step for step in _STEPS if abs(number) >= max(step[0], 1e4)), (1, ""))
    return f"{number / least:,.3g} {letter}" if letter else f"{int(number):,}"

"""What results have in common: a line as ``repr``, a table in notebooks, their path, entries by address."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

from modelexport.core.selectors import find_call
from modelexport.core.text import short_repr

Rows = Iterable[Sequence[object]]
_SHOWN_ROWS = 50
"""Rows of a table in a notebook."""


class Shown:
    """A result whose ``repr`` is a line, and in a notebook that line with a table."""

    __slots__ = ()
    __repr__ = short_repr

    def _table(self) -> Rows:
        """The headings, then the rows; nothing if the line says all."""
        return ()

    def _repr_html_(self) -> str:
        first, *rows = [*self._table()] or [()]
        lines = [_row("th", first), *(_row("td", row) for row in rows[:_SHOWN_ROWS])] if rows else []
        more = f"<div>{len(rows) - _SHOWN_ROWS:,} more</div>" if len(rows) > _SHOWN_ROWS else ""
        return f"<div><code>{html.escape(repr(self))}</code><table>{''.join(lines)}</table>{more}</div>"


class Report(Shown):
    """What a comparison found. A subclass defines ``verdict``, or ``agrees``."""

    __slots__ = ()

    @property
    def verdict(self) -> Literal["agree", "tie", "differ", "not compared"]:
        """``agree``, ``differ`` or ``not compared``."""
        return "agree" if self.agrees else "differ"

    @property
    def agrees(self) -> bool:
        """Whether something was compared and nothing differs."""
        return self.verdict == "agree"

    @property
    def document(self) -> Any:
        """What ``--json`` prints: the verdict and the fields."""
        fields: Iterable[str] = getattr(self, "__struct_fields__", ())
        return {name: getattr(self, name) for name in ("verdict", "agrees", *fields)}


class _Addressed(Protocol):
    @property
    def address(self) -> str: ...

    @property
    def tag(self) -> str: ...


Entry = TypeVar("Entry", bound=_Addressed)


class CallReport(Report, Generic[Entry]):
    """A comparison with an entry for each call."""

    __slots__ = ()
    calls: Sequence[Entry]

    def __getitem__(self, name: str) -> Entry:
        """The entry of the call with an address or a tag."""
        by_address = {entry.address or ".": entry for entry in self.calls}
        tags = {address: entry.tag for address, entry in by_address.items()}
        return by_address[find_call(name, tags, where="the report")]


class Written(Shown):
    """A result that was written: ``os.fspath`` gives the path, so that it can be given wherever a file is taken."""

    __slots__ = ()
    path: Any

    def __fspath__(self) -> str:
        return str(self.path)


def error_text(error: float | None) -> str:
    """An error in a table."""
    return "" if error is None else f"{error:.1e}"


def _row(cell: str, values: Iterable[object]) -> str:
    cells = (f"<{cell} style='text-align:left'>{html.escape(str(value))}</{cell}>" for value in values)
    return f"<tr>{''.join(cells)}</tr>"

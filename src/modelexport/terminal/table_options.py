"""Tables of figures of a file or a package: which rows are shown, and in which forms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from modelexport.core.declared_options import argument, option
from modelexport.errors import ModelExportError, UsageError
from modelexport.terminal.printing import document_of_parts, fitting_depth, format_headings, left_out, print_json

if TYPE_CHECKING:
    from modelexport.core.selectors import Selection
    from modelexport.tables.columns import Column
    from modelexport.tables.html_page import Page
    from modelexport.tables.table import Table
    from modelexport.tagged.file import TaggedFile

Grouping = Literal["call", "module", "class"]


ONLY = argument(
    (), "Only these calls and the calls inside them: encoder.layer.0, *.dense, !...", metavar="[SELECTOR]..."
)


SIZE = option(
    (), "The size of a dynamic axis; by default that of the example inputs, or a small size.", metavar="NAME=N"
)


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """What is shown"""

    by: Grouping = option("call", "One row for each call, module or class.")
    depth: int | None = option(None, "Show N levels below the root.", metavar="N", least=0)
    sort: str | None = option(
        None, "Sort by this column, largest own figure first; total.COLUMN: by totals.", metavar="COLUMN"
    )
    as_csv: bool = option(False, "Print CSV and nothing else.", flag="--csv")
    as_json: bool = option(False, "Print one JSON document and nothing else.", flag="--json")
    html: Path | None = option(
        None, "Also write an interactive page that works offline.", metavar="OUT.html", file="written alone"
    )
    node_data: Path | None = option(
        None, "Also write node data for Model Explorer.", metavar="OUT.json", file="written alone"
    )

    def check(self, columns: Iterable[Column]) -> None:
        """Check, before anything is measured, that a table with these columns can be shown so."""
        from modelexport.tables.columns import sorted_by

        if self.as_csv and self.as_json:
            raise UsageError("give --csv or --json, not both")
        if self.sort is not None:
            sorted_by(columns, self.sort)


def show(
    tables: Mapping[str, Table],
    main: str,
    selectors: Sequence[str],
    shown: TableOptions,
    results: Mapping[str, Any] | None = None,
    pages: Sequence[Page] = (),
) -> None:
    """Write the tables of a file or of the parts of a package in all the ways that were asked for.

    Args:
        tables: Of a file under an empty name, or of parts by name.
        results: What the tables are of, by the same names, if their documents have more than the tables.
        pages: What the HTML page shows, if it is more than the tables.
    """
    from modelexport.terminal import show_table

    chosen = selected_calls(tables, selectors)
    rows = [row for name, only in chosen.items() for row in tables[name].rows(only=only)]
    if selectors and not any(any(row.total.values()) for row in rows):
        raise ModelExportError(
            f"{' '.join(selectors)}: these calls have no figures: they compute nothing, or are in a branch not taken"
        )
    for name in chosen:
        shown.check(tables[name].columns)
    if shown.node_data is not None:
        from modelexport.tables.model_explorer import write_node_data

        for name, table in tables.items():
            path = shown.node_data.with_suffix(f".{name}{shown.node_data.suffix}") if name else shown.node_data
            write_node_data(table, path, column=main)
    if shown.html is not None:
        from modelexport.tables.html_page import Page, write_page

        write_page(shown.html, *(pages or [Page(table, main, part=name) for name, table in tables.items()]))
    if shown.as_json:
        documents = {
            name: (results or tables)[name].document(by=shown.by, depth=shown.depth, only=only, sort=shown.sort)
            for name, only in chosen.items()
        }
        print_json(document_of_parts(documents))
    elif shown.as_csv:
        listed = {name: tables[name].rows(shown.by, depth=shown.depth, only=only) for name, only in chosen.items()}
        if shown.sort is not None:
            listed = {name: tables[name].sorted(rows, shown.sort) for name, rows in listed.items()}
        print(show_table.format_csv({name: (tables[name], rows) for name, rows in listed.items()}), end="")
    else:
        texts = {tables[name].part: _fitted(tables[name], main, only, shown) for name, only in chosen.items()}
        print(format_headings(texts))


def _fitted(table: Table, main: str, only: Selection | None, shown: TableOptions) -> str:
    """The table as deep as the screen allows, and how to see the rest."""
    from modelexport.terminal import show_table

    flat = shown.sort is not None or shown.by == "class"
    levels = [] if flat else [row.depth for row in table.rows(shown.by, only=only) if any(row.total.values())]
    depth = fitting_depth(levels, shown.depth)
    how: dict[str, Any] = {"by": shown.by, "depth": depth, "sort": shown.sort, "screen": show_table.Screen.here()}
    more = left_out(levels, depth) if shown.depth is None else ""
    return "\n".join([show_table.format_table(table, main, only=only, **how), *([more] if more else [])])


def selected_calls(tables: Mapping[str, Table | TaggedFile], selectors: Sequence[str]) -> dict[str, Selection | None]:
    """The tables or files that have any of the calls that selectors pick, with those; all without selectors."""
    from modelexport.core.selectors import select_calls
    from modelexport.tagged.file import TaggedFile

    if not selectors:
        return dict.fromkeys(tables)
    chosen: dict[str, Selection | None] = {}
    failure: UsageError | None = None
    for name, table in tables.items():
        try:
            where = table.path if isinstance(table, TaggedFile) else table.name
            chosen[name] = select_calls(selectors, table.calls, table.tags, where=where)
        except UsageError as error:
            failure = error
    if not chosen and failure is not None:
        raise failure
    return chosen

"""Tables as one HTML file that works offline: a foldable tree with bars, an icicle that zooms, search, nodes, and the
graph inside each module.

Its parts are the files in ``page/``, which are put into one when it is written. Of libraries it has only dagre, which
lays out graphs, and only if a graph is on it. Its content security policy forbids requests.
"""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.tags import class_in_tag
from modelexport.files.atomic_writing import write_alone
from modelexport.graph.node_owners import owner_of
from modelexport.runtime.shapes import Shapes
from modelexport.tables.columns import Column, Figure, Kind
from modelexport.tables.graph_pairs import NodePair
from modelexport.tables.model_explorer import ExplorerPlace
from modelexport.tables.page_graph import page_graph
from modelexport.tables.table import Table, share_out
from modelexport.tagged.file import TaggedFile

if TYPE_CHECKING:  # which imports the runtime
    from modelexport.traces.value_ranges import ValueRange

Section = tuple[str, Sequence[Sequence[str]]]
"""A heading and rows of cells; the first cell of each row is a heading too. ``#encoder.layer.0`` leads to that call."""


@dataclass(frozen=True)
class Page:
    """What is shown of one file, or of one part of a package."""

    table: Table
    main: str
    """The column that is shown first."""
    sections: Sequence[Section] = ()
    """What else to show, below the table."""
    part: str = ""
    """The name to choose it by where there are several."""
    against: str = ""
    """The other file, whose figures are in columns that begin with ``against_``."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The path of a module to the Python module and the line of its class."""
    file: TaggedFile | None = None
    """The file that the table is of, whose graph is drawn; its nodes are the first of the table."""
    ranges: Mapping[ir.Value, ValueRange] | None = None
    """What the values of the file were when it was run."""
    other_file: TaggedFile | None = None
    """The other file, whose graph is drawn beside it."""
    other_shapes: Shapes | None = None
    """Shapes of its values."""
    pairs: Sequence[NodePair] = ()
    """Which nodes of the two files are the same."""


SCRIPTS = ("data", "icicle", "tree", "values", "detail", "graph_boxes", "graph_drawing", "graph", "page")
"""The scripts of the page, in the order in which they run."""


def write_page(path: Path, *pages: Page) -> None:
    """Write tables as one HTML file that needs no other file. If there are several, the reader chooses one."""
    write_alone(path, format_page(*pages).encode())


def format_page(*pages: Page) -> str:
    """The text of :func:`write_page`."""
    encoded = msgspec.json.encode([_data(page) for page in pages]).decode()
    library = [_page_file("dagre.min.js").partition("//# sourceMappingURL")[0]] * any(page.file for page in pages)
    scripts = [*library, *(f'"use strict";\n{_page_file(f"{name}.js")}' for name in SCRIPTS)]
    parts = {
        "@@STYLE@@": _page_file("page.css"),
        "@@SCRIPTS@@": "\n".join(f"<script>\n{script}</script>" for script in scripts),
        # So that no name in the model can end the script.
        "@@DATA@@": encoded.replace("<", "\\u003c"),
    }
    return re.sub("@@[A-Z]+@@", lambda place: parts[place[0]], _page_file("page.html"))


def _page_file(name: str) -> str:
    return (files("modelexport.tables") / "page" / name).read_text(encoding="utf-8")


def embedded_page(*pages: Page) -> str:
    """The page in a frame of its own, for a notebook."""
    text = html.escape(format_page(*pages), quote=True)
    return f'<iframe srcdoc="{text}" style="width:100%;height:600px;border:1px solid #ccc"></iframe>'


def _data(page: Page) -> dict[str, Any]:
    """What the page's script reads. Totals that are sums or maxima it adds up itself."""
    table = page.table
    operators, nodes = _nodes(table, len(page.file.nodes) if page.file is not None else 0)
    graph = {}
    if page.file is not None:
        drawn = page_graph(page.file, table.shapes, page.ranges)
        graph = {name: getattr(drawn, name) for name in ("values", "types", "attributes", "lines")}
        nodes = [*map(list.__add__, nodes, drawn.nodes), *nodes[len(drawn.nodes) :]]
    sources = list(dict.fromkeys(page.sources.values()))
    return {
        "name": table.name,
        "part": page.part,
        "against": page.against,
        "main": page.main,
        "columns": [dataclasses.asdict(column) for column in table.columns],
        "rows": _rows(page, sources),
        "sources": sources,
        "operators": operators,
        "nodes": nodes,
        "graph": graph,
        "other": _other(page, operators) if page.file is not None and page.other_file is not None else None,
        "whole": {column.name: table.whole.get(column.name) for column in table.columns},
        "outside": [
            (name, {c.name: figures.get(c.name) for c in table.columns if figures.get(c.name)})
            for name, figures in table.outside_rows
        ],
        "sections": page.sections,
        "notes": table.notes,
    }


def _other(page: Page, operators: list[str]) -> dict[str, Any]:
    """The nodes of the other file, the calls that only it has, and which nodes are the same in both."""
    assert page.file is not None
    assert page.other_file is not None
    other, numbers = page.other_file, {traced.call: index for index, traced in enumerate(page.table.calls)}
    calls = []
    for traced in other.calls:
        if traced.call not in numbers:
            assert traced.parent is not None  # every file has a root
            numbers[traced.call] = len(numbers)
            tag = other.tags[traced.call]
            names = [_tail(traced.call, traced.parent), tag.rpartition("/")[2], class_in_tag(tag)]
            calls.append([numbers[traced.parent], *names])
    drawn, nodes, known = (
        page_graph(other, page.other_shapes),
        [],
        {name: index for index, name in enumerate(operators)},
    )
    for node, links in zip(other.nodes, drawn.nodes, strict=True):
        owner = owner_of(node)
        index = known.setdefault(node.op_type, len(known))
        nodes.append([node.name or "", index, [numbers[call] for call in owner.calls] if owner else [], [], *links])
    operators[:] = known
    places = [{node: index for index, node in enumerate(file.nodes)} for file in (page.file, other)]
    pairs = [
        [*(None if one is None else place[one] for one, place in zip((pair.first, pair.second), places, strict=True))]
        + ([pair.mark, pair.why] if pair.mark else [])
        for pair in page.pairs
    ]
    return {
        "calls": calls, "nodes": nodes, "pairs": pairs,
        "values": drawn.values, "types": drawn.types, "attributes": drawn.attributes, "lines": drawn.lines,
    }  # fmt: skip


def _rows(page: Page, sources: list[str]) -> list[list[Any]]:
    """A row for each call: its parent, its names, its own figures, totals that are not sums, and its source."""
    table, source_of = page.table, {text: index for index, text in enumerate(sources)}
    spread = [column for column in table.columns if column.kind is Kind.SPREAD]
    numbers = {traced.call: index for index, traced in enumerate(table.calls)}
    totals = {row.calls[0]: row for row in table.rows()} if spread else {}
    rows = []
    for traced in table.calls:
        call, parent = traced.call, traced.parent
        shown = totals.get(call)
        total = {} if shown is None else {c.name: shown.total.get(c.name) for c in spread}
        own_figures = {
            column.name: figures[call]
            for column in table.columns
            if call in (figures := table.own.get(column.name, {}))
        }
        tag = table.tags[call]
        above = None if parent is None else numbers[parent]
        names = [_tail(call, parent), tag.rpartition("/")[2], class_in_tag(tag)]
        rows.append([above, *names, own_figures, total, source_of.get(page.sources.get(call.path, ""))])
    return rows


def _nodes(table: Table, of_file: int) -> tuple[list[str], list[list[Any]]]:
    """The operators, and for each node its name, operator, calls and figures; without what is not a node of a call.

    One that was run also has the number of the node of the file that it computes.
    """
    numbers = {traced.call: index for index, traced in enumerate(table.calls)}
    operators: dict[str, int] = {}
    places: dict[ExplorerPlace, int] = {}
    nodes: list[list[Any]] = []
    for position, node in enumerate(table.nodes):
        if node.calls or position < of_file:
            index = operators.setdefault(node.op_type, len(operators))
            listed = [_first(column, node.figures, len(node.calls)) for column in table.columns]
            place = [places[node.place]] if position >= of_file and node.place in places else []
            nodes.append([node.name, index, [numbers[call] for call in node.calls], listed, *place])
        if position < of_file and node.place[1]:
            places[node.place] = position
    return list(operators), nodes


def _first(column: Column, figures: Mapping[str, Figure], count: int) -> Figure | None:
    """Each owner's share of a node's figure."""
    figure = figures.get(column.name)
    return figure if figure is None or column.kind is not Kind.SUM else share_out(figure, count or 1)[0]


def _tail(call: ModuleCall, parent: ModuleCall | None) -> str:
    """The rest of an address after that of the caller's module."""
    address = call.address
    if parent is not None and parent.path and address.startswith(f"{parent.path}."):
        return address.removeprefix(parent.path)
    return address

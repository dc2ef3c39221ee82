"""Figures by module call: one table type for all sources and outputs.

A node's figures are divided among the calls that own it, so that nothing is lost or counted twice; a call's total is
the sum of its own figures and those of the calls inside it. Figures that belong to no call are ``outside``.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from modelexport.core.calls import CallTree, ModuleCall
from modelexport.core.selectors import Selection
from modelexport.core.tags import class_in_tag
from modelexport.core.text import plural, shortened
from modelexport.runtime.shapes import Shapes
from modelexport.tables.columns import COMBINED, Column, Figure, Kind, column_named, sorted_by

By = Literal["call", "module", "class"]
OUTSIDE = "(outside of modules)"
"""The row of the nodes that belong to no call."""


@dataclass(frozen=True)
class NodeFigures:
    """The figures of one node of the file, or of the graph that was run."""

    name: str
    op_type: str
    calls: tuple[ModuleCall, ...]
    """Its owners; empty if it does not belong to a module."""
    figures: Mapping[str, Figure]
    """Column to figure."""
    runs: tuple[int, ...] = ()
    """The time of the node in each of several runs, in the unit of the spread's column."""
    place: tuple[str, str] = ("", "")
    """The graph and the node of the file, as Model Explorer calls them; empty for a node that only the runtime has."""


@dataclass(frozen=True)
class FigureRow:
    """The figures of a call, of all calls of a module, or of all calls of the modules of a class."""

    address: str
    """``.`` for the root; a selector that picks these calls."""
    tag: str
    class_name: str
    depth: int
    calls: tuple[ModuleCall, ...]
    own: Mapping[str, Figure]
    total: Mapping[str, Figure]


@dataclass(frozen=True, eq=False)
class Table:
    """Figures of a file by module call."""

    calls: CallTree
    tags: Mapping[ModuleCall, str]
    columns: tuple[Column, ...]
    nodes: tuple[NodeFigures, ...] = ()
    direct: Mapping[str, Mapping[ModuleCall, Figure]] = field(default_factory=dict)
    """Column to figures that belong to calls directly, not through nodes."""
    name: str = "model"
    part: str = ""
    """The part of a package that the table is of, with its use in parentheses if it is measured in several."""
    notes: tuple[str, ...] = ()
    """What the figures do not include, and other notes for the reader."""
    shapes: Shapes | None = None
    """The shapes of the file's values with which the figures were computed, if they were."""

    def __repr__(self) -> str:
        figures = (f"{name} {shortened(str(figure), 40)}" for name, figure in self.numbers(self.whole).items())
        return f"<Table {self.name}: {plural(len(self.calls), 'call')}; {', '.join(figures)}>"

    @property
    def shown(self) -> tuple[Column, ...]:
        """The columns that are shown."""
        return tuple(column for column in self.columns if not column.hidden)

    def column(self, name: str) -> Column:
        """The column with a name."""
        return column_named(self.columns, name)

    @cached_property
    def own(self) -> Mapping[str, Mapping[ModuleCall, Figure]]:
        """Column to the own figures of calls, without figures that belong to no call."""
        return {column.name: self._by_call(column) for column in self.columns if column.kind in COMBINED}

    @cached_property
    def outside(self) -> Mapping[str, Figure]:
        """Column to the figures of what belongs to no call."""
        return self._figures_outside([node for node in self.nodes if not node.calls])

    @cached_property
    def outside_rows(self) -> Sequence[tuple[str, Mapping[str, Figure]]]:
        """The figures outside of all calls: a row for all nodes, and one for each other entry of a profile."""
        groups: dict[str, list[NodeFigures]] = {}
        for node in self.nodes:
            if not node.calls:
                groups.setdefault(node.name if not node.op_type else OUTSIDE, []).append(node)
        return [(name, self._figures_outside(nodes)) for name, nodes in groups.items()]

    @cached_property
    def whole(self) -> Mapping[str, Figure]:
        """The figures of the whole file, including those that belong to no call."""
        whole: dict[str, Figure] = {}
        for column in self.columns:
            if column.kind in COMBINED:
                figures = [*self.own[column.name].values()]
                outside = [n.figures[column.name] for n in self.nodes if not n.calls and column.name in n.figures]
                if (joined := _joined(column, [*figures, *outside])) is not None:
                    whole[column.name] = joined
        return whole

    def rows(self, by: By = "call", *, depth: int | None = None, only: Selection | None = None) -> list[FigureRow]:
        """The rows, the root first, callers before callees.

        Args:
            by: ``call``; ``module``: all calls of a module together; ``class``: all calls of the modules of a class.
            depth: Leave out rows deeper than this below the root.
            only: Leave out the calls that selectors do not pick.
        """
        order = [traced for traced in self.calls if only is None or traced.call in only]
        order = [traced for traced in order if depth is None or traced.depth <= depth]
        groups: dict[str, list[ModuleCall]] = {}
        for traced in order:
            groups.setdefault(self._key(traced.call, by), []).append(traced.call)
        rows = []
        for key, calls in groups.items():
            first = calls[0]
            rows.append(
                FigureRow(
                    address=key,
                    tag=self.tags[first] if by != "class" else class_in_tag(self.tags[first]),
                    class_name=class_in_tag(self.tags[first]),
                    depth=self.calls[first].depth if by != "class" else 0,
                    calls=tuple(calls),
                    own=self._figures(calls),
                    total=self._figures({each for call in calls for each in self.calls.inside(call)}),
                )
            )
        return rows

    def document(
        self, by: By = "call", *, depth: int | None = None, only: Selection | None = None, sort: str | None = None
    ) -> dict[str, Any]:
        """The table as JSON values: ``columns``, ``rows``, ``outside``."""
        rows = self.rows(by, depth=depth, only=only)
        if sort is not None:
            rows = self.sorted(rows, sort)
        return {
            "columns": {column.name: column.unit for column in self.shown},
            "rows": [
                {
                    "address": "" if row.address == "." else row.address,
                    "tag": row.tag,
                    "class": row.class_name,
                    "depth": row.depth,
                    "own": self.numbers(row.own),
                    "total": self.numbers(row.total),
                }
                for row in rows
            ],
            "outside": self.numbers(self.outside),
        }

    def sorted(self, rows: Iterable[FigureRow], sort: str) -> list[FigureRow]:
        """Rows with the largest figure first: own ones of a column by its name, totals by ``total.`` and its name."""
        column, side = sorted_by(self.columns, sort)
        return sorted(rows, key=lambda row: -float(column.number(getattr(row, side).get(column.name, float("-inf")))))

    def numbers(self, figures: Mapping[str, Figure]) -> dict[str, Any]:
        """Figures in the units of their columns, without hidden columns."""
        return {c.name: c.number(figures[c.name]) for c in self.shown if c.name in figures}

    def with_column(self, column: Column, figures: Mapping[ModuleCall, Figure]) -> Table:
        """The same table with one more column, of figures that calls have themselves: errors, sensitivity."""
        return replace(self, columns=(*self.columns, column), direct={**self.direct, column.name: figures})

    def _key(self, call: ModuleCall, by: By) -> str:
        if by == "class":
            return f"class:{class_in_tag(self.tags[call])}"
        return str(call) if by == "call" else call.path or "."

    def _by_call(self, column: Column) -> dict[ModuleCall, Figure]:
        figures_of: dict[ModuleCall, list[Figure]] = {}
        for node in self.nodes:
            if node.calls and column.name in node.figures:
                figure = node.figures[column.name]
                parts = share_out(figure, len(node.calls)) if column.kind is Kind.SUM else [figure] * len(node.calls)
                for call, part in zip(node.calls, parts, strict=True):
                    figures_of.setdefault(call, []).append(part)
        for call, figure in self.direct.get(column.name, {}).items():
            figures_of.setdefault(call, []).append(figure)
        return {call: _joined(column, figures) for call, figures in figures_of.items()}

    def _figures(self, calls: Collection[ModuleCall]) -> dict[str, Figure]:
        """The figures of some calls together."""
        figures: dict[str, Figure] = {}
        for column in self.columns:
            if column.name in self.own:
                own_figures = self.own[column.name]
                joined = _joined(column, [own_figures[call] for call in calls if call in own_figures])
                if joined is not None:
                    figures[column.name] = joined
                elif column.kind is Kind.SUM:
                    figures[column.name] = 0
        return self._with_derived(figures, (self._own_runs[call] for call in calls if self._own_runs.get(call)))

    def _figures_outside(self, nodes: Sequence[NodeFigures]) -> Mapping[str, Figure]:
        sums = {
            column.name: _joined(column, [node.figures[column.name] for node in nodes if column.name in node.figures])
            for column in self.columns
            if column.kind in COMBINED
        }
        figures = {name: figure for name, figure in sums.items() if figure is not None}
        return self._with_derived(figures, (node.runs for node in nodes if node.runs))

    def _with_derived(self, figures: dict[str, Figure], runs: Iterator[Sequence[int]]) -> dict[str, Figure]:
        for column in self.columns:
            if column.kind is Kind.RATIO and column.of[0] in figures:
                above = figures[column.of[0]]
                below = self.whole.get(column.of[1], 0) if column.share else figures.get(column.of[1], 0)
                if below:
                    figures[column.name] = above / below
            elif column.kind is Kind.SPREAD and (taken := [sum(run) for run in zip(*runs, strict=True)]):
                figures[column.name] = _quartile_range(taken)
        return figures

    @cached_property
    def _own_runs(self) -> Mapping[ModuleCall, Sequence[int]]:
        runs_of: dict[ModuleCall, list[int]] = {}
        for node in self.nodes:
            for call in node.calls:
                parts = runs_of.setdefault(call, [0] * len(node.runs))
                for index, taken in enumerate(node.runs):
                    parts[index] += taken // len(node.calls)
        return runs_of


def share_out(figure: Figure, count: int) -> list[Figure]:
    """Split a figure into equal parts; an integer into integers that add up to it, the larger ones first."""
    if count == 1:
        return [figure]
    if isinstance(figure, float):
        return [figure / count] * count
    least, more = divmod(figure, count)
    return [least + (index < more) for index in range(count)]


def _joined(column: Column, figures: Sequence[Figure]) -> Figure | None:
    """Combine the figures of several nodes or calls; ``None`` if there are none."""
    if not figures:
        return None
    if column.kind is not Kind.SUM:
        return max(figures) if column.kind is Kind.LARGEST else min(figures)
    return sum(figures)


def _quartile_range(runs: Sequence[int]) -> int:
    """The difference of the third and the first quartile, in whole units."""
    if len(runs) < 2:
        return 0
    first, _, third = statistics.quantiles(runs, n=4, method="inclusive")
    return round(third - first)

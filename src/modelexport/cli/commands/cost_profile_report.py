"""Figures by module: `cost`, `profile`, `report`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from modelexport.cli.model_argument import Loading, ModelChoice
from modelexport.cli.printing import document_of_parts, fitting_depth, format_headings, left_out, print_json
from modelexport.cli.progress import stages_on_line
from modelexport.cli.shared_options import ARRAYS, DEVICE, FILE_OR_FOLDER, parsed_sizes
from modelexport.core.declared_options import argument, option
from modelexport.errors import UsageError

if TYPE_CHECKING:
    from modelexport.core.selectors import Selection
    from modelexport.measure.columns import Column
    from modelexport.measure.table import Table
    from modelexport.tagged.file import TaggedFile

Grouping = Literal["call", "module", "class"]
LevelName = Literal["all", "extended", "basic", "none"]
ONLY = argument(
    (), "Only these calls and the calls inside them: encoder.layer.0, *.dense, !...", metavar="[SELECTOR]..."
)
SIZE = option(
    (), "The size of a dynamic axis; by default that of the example inputs, or a small size.", metavar="NAME=N"
)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What is shown"""

    by: Grouping = option("call", "One row for each call, module or class.")
    depth: int | None = option(None, "Show N levels below the root.", metavar="N")
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
        """Check, before anything is measured, that a table with these columns can be shown so.

        Raises:
            UsageError: There is no column to sort by, or two formats are asked for.
        """
        from modelexport.measure.columns import sorted_by

        if self.as_csv and self.as_json:
            raise UsageError("give --csv or --json, not both")
        if self.sort is not None:
            sorted_by(columns, self.sort)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How FILE is run"""

    runs: int = option(10, "The number of measured runs.", metavar="N", least=1)
    warmup: int = option(2, "The number of runs before the measured ones.", metavar="N", least=0)
    level: LevelName = option("all", "ONNX Runtime's optimization level.")
    provider: str = DEVICE


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What it is compared with"""

    against: Path | None = option(
        None, "Another ONNX file of the same model, for example a quantized one.", metavar="OTHER.onnx", file="read"
    )
    against_torch: str | None = option(
        None, "Compare with the time of the same model in PyTorch.", metavar="MODEL", file="model"
    )


def cost(
    file: Path = FILE_OR_FOLDER,
    selectors: Sequence[str] = ONLY,
    size: Sequence[str] = SIZE,
    *,
    shown: Shown,
) -> None:
    """Show the cost of each module: parameters, operations, bytes, memory."""
    from modelexport.packages.measured_parts import cost_parts

    sizes = parsed_sizes(size)
    with stages_on_line()("cost"):
        tables = cost_parts(file, sizes)
    show(tables, "flops", selectors, shown)


def profile(
    file: Path = FILE_OR_FOLDER,
    selectors: Sequence[str] = ONLY,
    inputs: Path | None = ARRAYS,
    size: Sequence[str] = SIZE,
    *,
    how: RunOptions,
    beside: Beside,
    loading: Loading,
    shown: Shown,
) -> None:
    """Run FILE in ONNX Runtime as users do, and show the time and memory of each module."""
    from modelexport.measure import columns

    compared = beside.against is not None or beside.against_torch is not None
    shown.check((*columns.PROFILE, columns.AGAINST, columns.RATIO) if compared else columns.PROFILE)
    if beside.against is not None and beside.against_torch is not None:
        raise UsageError("give --against or --against-torch, not both")
    if beside.against_torch is not None and file.is_dir():
        raise UsageError(f"{file} is a folder: give --against-torch with a file of the whole model")
    from modelexport.measure import side_by_side as comparing
    from modelexport.packages.measured_parts import common_sizes, profile_parts, profile_same
    from modelexport.runtime.devices import find_device
    from modelexport.tagged.file import read_tagged
    from modelexport.tagged.package import files_of

    if selectors:
        _chosen({name: read_tagged(part) for name, part in files_of(file).items()}, selectors)  # before the work
    device = find_device(how.provider)
    if device.compiles and not file.is_dir():
        if compared:
            raise UsageError(f"{device} compiles its graphs: --against and --against-torch go with other devices")
        from modelexport.devices.times_alone import time_calls_alone

        where: dict[str, Any] = {"inputs": inputs, "sizes": parsed_sizes(size), "seed": loading.seed}
        table = time_calls_alone(file, device=how.provider, tell=stages_on_line().tell, **where)
        show({"": table}, "seconds_alone", selectors, shown)
        return
    running = dataclasses.asdict(how)
    stages = stages_on_line()
    run_inputs: Any = inputs
    sizes = parsed_sizes(size)
    if beside.against is not None and inputs is None:
        sizes = common_sizes(file, beside.against, sizes)
    if beside.against_torch is not None:
        loaded, example = ModelChoice(beside.against_torch, inputs, loading).of_file(file).load(stages)
        from modelexport.pytorch.inputs.named_inputs import feeds
        from modelexport.runtime.sessions import open_file, session_options

        run_inputs = feeds(example, open_file(file, session_options("none", how.provider)))
    with stages(f"run {file.name}"):
        measured = profile_parts(file, run_inputs, sizes=sizes, seed=loading.seed, **running)
    if beside.against is not None:
        with stages(f"run {beside.against.name}"):
            others = profile_same(beside.against, measured, **running)
        measured = {name: comparing.profile_against(part, others[name]) for name, part in measured.items()}
    elif beside.against_torch is not None:
        from modelexport.pytorch.calls.call_times import time_calls

        with stages("run PyTorch"):
            seconds = time_calls(loaded.model, example, runs=how.runs, warmup=how.warmup)
        measured = {name: comparing.profile_beside(part, seconds, "PyTorch") for name, part in measured.items()}
    show({name: part.table for name, part in measured.items()}, "seconds", selectors, shown, measured)


def report(
    file: Path = FILE_OR_FOLDER,
    output: Path = option(..., "The page to write.", flag="-o --output", metavar="OUT.html", file="written alone"),
    size: Sequence[str] = SIZE,
    profiled: bool = option(False, "Also run FILE, and show the time of each module.", flag="--profile"),
    against: Path | None = option(
        None,
        "A quantized version of FILE: show its error, and with --profile its time.",
        metavar="OTHER.onnx",
        file="read",
    ),
    provider: str = DEVICE,
) -> None:
    """Write the tree of FILE, its coverage, its verification and its cost to one page."""
    from modelexport.packages.report_page import write_report_page
    from modelexport.runtime.devices import find_device

    stages = stages_on_line()
    if (device := find_device(provider)).compiles:
        raise UsageError(
            f"ONNX Runtime has no times of nodes on {device}: `modelexport profile --device` cuts calls out"
        )
    if against is not None and file.is_dir():
        raise UsageError(f"{file} is a folder: give --against with one of its parts")
    with stages("report"):
        write_report_page(file, output, sizes=parsed_sizes(size), profiled=profiled, provider=provider, against=against)
    print(output)


def show(
    tables: Mapping[str, Table],
    main: str,
    selectors: Sequence[str],
    shown: Shown,
    results: Mapping[str, Any] | None = None,
) -> None:
    """Write the tables of a file or of the parts of a package in all the ways that were asked for.

    Args:
        tables: Of a file under an empty name, or of parts by name.
        results: What the tables are of, by the same names, if their documents have more than the tables.
    """
    from modelexport.cli import show_table

    chosen = _chosen(tables, selectors)
    for name in chosen:
        shown.check(tables[name].columns)
    if shown.node_data is not None:
        from modelexport.measure.model_explorer import write_node_data

        for name, table in tables.items():
            path = shown.node_data.with_suffix(f".{name}{shown.node_data.suffix}") if name else shown.node_data
            write_node_data(table, path, column=main)
    if shown.html is not None:
        from modelexport.measure.html_page import Page, write_page

        write_page(shown.html, *(Page(table, main, part=name) for name, table in tables.items()))
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


def _fitted(table: Table, main: str, only: Selection | None, shown: Shown) -> str:
    """The table as deep as the screen allows, and how to see the rest."""
    from modelexport.cli import show_table

    flat = shown.sort is not None or shown.by == "class"
    levels = [] if flat else [row.depth for row in table.rows(shown.by, only=only) if any(row.total.values())]
    depth = fitting_depth(levels, shown.depth)
    how: dict[str, Any] = {"by": shown.by, "depth": depth, "sort": shown.sort, "screen": show_table.Screen.here()}
    more = left_out(levels, depth) if shown.depth is None else ""
    return "\n".join([show_table.format_table(table, main, only=only, **how), *([more] if more else [])])


def _chosen(tables: Mapping[str, Table | TaggedFile], selectors: Sequence[str]) -> dict[str, Selection | None]:
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

"""Figures by module: `cost`, `profile`, `report`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from modelexport.cli.guards import READ, READ_MODEL, WRITTEN
from modelexport.cli.options import (
    FileOrFolderArgument,
    JsonOption,
    ModelClassOption,
    RemoteCodeOption,
    SeedOption,
    parsed_sizes,
)
from modelexport.cli.running import load_with_inputs, print_json, progress_shown
from modelexport.errors import UsageError

if TYPE_CHECKING:
    from modelexport.core.selectors import Selection
    from modelexport.measure.table import Table

Grouping = Literal["call", "module", "class"]
LevelName = Literal["all", "extended", "basic", "none"]
SelectorsOption = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SELECTOR]...", help="Only these calls and those inside: encoder.layer.0, *.dense, !..."),
]
ByOption = Annotated[Grouping, typer.Option("--by", help="A row for each call, module or class.")]
DepthOption = Annotated[int | None, typer.Option("--depth", metavar="N", help="Show N levels below the root.")]
SortOption = Annotated[str | None, typer.Option("--sort", metavar="COLUMN", help="Largest own figure first.")]
CsvOption = Annotated[bool, typer.Option("--csv", help="Print CSV and nothing else.")]
HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", metavar="OUT.html", help="Also write an interactive page that works offline."),
    WRITTEN,
]
NodeDataOption = Annotated[
    Path | None,
    typer.Option("--node-data", metavar="OUT.json", help="Also write node data for Model Explorer."),
    WRITTEN,
]


def cost(
    file: FileOrFolderArgument,
    selectors: SelectorsOption = None,
    size: Annotated[
        list[str] | None,
        typer.Option("--size", metavar="NAME=N", help="The size of a dynamic axis; figures without it are formulas."),
    ] = None,
    by: ByOption = "call",
    depth: DepthOption = None,
    sort: SortOption = None,
    as_csv: CsvOption = False,
    html: HtmlOption = None,
    node_data: NodeDataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the cost of each module: parameters, operations, bytes, memory. Nothing is run."""
    from modelexport.core.stages import Stages
    from modelexport.packages.measured_parts import cost_parts

    sizes = parsed_sizes(size or [])
    with progress_shown() as progress, Stages(progress)("cost"):
        tables = cost_parts(file, sizes)
    show(tables, "flops", selectors, by, depth, sort, as_csv=as_csv, html=html, node_data=node_data, as_json=as_json)


def profile(
    file: FileOrFolderArgument,
    selectors: SelectorsOption = None,
    inputs: Annotated[
        Path | None,
        typer.Option("--inputs", metavar="FILE", help="Arrays by name: .npz, .safetensors, or a JSON description."),
        READ,
    ] = None,
    size: Annotated[
        list[str] | None, typer.Option("--size", metavar="NAME=N", help="The size of a dynamic axis of random inputs.")
    ] = None,
    runs: Annotated[int, typer.Option("--runs", metavar="N", min=1, help="The number of measured runs.")] = 10,
    warmup: Annotated[int, typer.Option("--warmup", metavar="N", min=1, help="The number of runs before these.")] = 2,
    level: Annotated[LevelName, typer.Option("--level", help="ONNX Runtime's optimization level.")] = "all",
    provider: Annotated[
        str, typer.Option(metavar="NAME", help="The execution provider of ONNX Runtime.")
    ] = "CPUExecutionProvider",
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="OTHER.onnx", help="Another tagged file of the same model."),
        READ,
    ] = None,
    against_torch: Annotated[
        str | None,
        typer.Option("--against-torch", metavar="MODEL", help="Compare with the same model in PyTorch."),
        READ_MODEL,
    ] = None,
    by: ByOption = "call",
    depth: DepthOption = None,
    sort: SortOption = None,
    as_csv: CsvOption = False,
    html: HtmlOption = None,
    node_data: NodeDataOption = None,
    model_class: ModelClassOption = None,
    trust_remote_code: RemoteCodeOption = False,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Run FILE in ONNX Runtime as users do, and show the time and memory of each module."""
    import msgspec

    from modelexport.core.stages import Stages
    from modelexport.measure import beside
    from modelexport.packages.measured_parts import profile_parts, profile_same

    if against is not None and against_torch is not None:
        raise UsageError("give --against or --against-torch, not both")
    if against_torch is not None and file.is_dir():
        raise UsageError(f"{file} is a folder: give --against-torch with a file of the whole model")
    how: dict[str, Any] = {"runs": runs, "warmup": warmup, "level": level, "provider": provider}
    with progress_shown() as progress:
        stages = Stages(progress)
        given: Any = inputs
        if against_torch is not None:
            loaded, example = load_with_inputs(
                against_torch, inputs, model_class, trust_remote_code, seed, stages, dtype=None
            )
            from modelexport.measure.runs import open_file, session_options
            from modelexport.verify.feeding import feeds

            given = feeds(example, open_file(file, session_options("none", provider), provider))
        with stages(f"run {file.name}"):
            measured = profile_parts(file, given, sizes=parsed_sizes(size or []), seed=seed, **how)
        if against is not None:
            with stages(f"run {against.name}"):
                others = profile_same(against, measured, **how)
            measured = {name: beside.profile_against(one, others[name]) for name, one in measured.items()}
        elif against_torch is not None:
            from modelexport.pytorch.timing import time_calls

            with stages("run PyTorch"):
                seconds = time_calls(loaded.model, example, runs=runs, warmup=warmup)
            measured = {name: beside.profile_beside(one, seconds, "PyTorch") for name, one in measured.items()}
    more = {
        name: {"run": msgspec.to_builtins(one.facts)}
        | ({"against": msgspec.to_builtins(one.against)} if one.against is not None else {})
        for name, one in measured.items()
    }
    show(
        {name: one.table for name, one in measured.items()},
        "seconds",
        selectors,
        by,
        depth,
        sort,
        as_csv=as_csv,
        html=html,
        node_data=node_data,
        as_json=as_json,
        more=more,
    )


def report(
    file: FileOrFolderArgument,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT.html", help="The page to write."), WRITTEN],
    size: Annotated[
        list[str] | None, typer.Option("--size", metavar="NAME=N", help="The size of a dynamic axis.")
    ] = None,
    profiled: Annotated[bool, typer.Option("--profile", help="Also run it, and show the time of each module.")] = False,
) -> None:
    """Write the tree of FILE, its coverage, its verification and its cost to one page."""
    from modelexport.core.stages import Stages
    from modelexport.packages.report_page import write_report_page

    with progress_shown() as progress:
        stages = Stages(progress)
        with stages("report"):
            write_report_page(file, output, sizes=parsed_sizes(size or []), profiled=profiled)
    print(output)


def show(
    tables: Mapping[str, Table],
    main: str,
    selectors: list[str] | None,
    by: Grouping,
    depth: int | None,
    sort: str | None,
    *,
    as_csv: bool,
    html: Path | None,
    node_data: Path | None,
    as_json: bool,
    more: Mapping[str, dict[str, Any]] | None = None,
) -> None:
    """Write the tables of a file or of the parts of a package in all the ways that were asked for.

    Args:
        tables: Of a file under an empty name, or of parts by name.
        more: What JSON has beside the tables.
    """
    from modelexport.cli import show_table
    from modelexport.cli.show_package import format_headings

    if as_csv and as_json:
        raise UsageError("give --csv or --json, not both")
    chosen = _chosen(tables, selectors or [])
    if sort is not None:
        for name in chosen:
            tables[name].column(sort)
    if node_data is not None:
        from modelexport.measure.node_data import write_node_data

        for name, table in tables.items():
            path = node_data.with_suffix(f".{name}{node_data.suffix}") if name else node_data
            write_node_data(table, path, column=main)
    if html is not None:
        from modelexport.measure.page import Page, write_page

        write_page(html, *(Page(table, main, part=name) for name, table in tables.items()))
    if as_json:
        documents = {
            name: tables[name].document(by, depth=depth, only=only, sort=sort) | (more or {}).get(name, {})
            for name, only in chosen.items()
        }
        print_json(documents[""] if "" in tables else {"parts": documents})
    elif as_csv:
        listed = {name: tables[name].rows(by, depth=depth, only=only) for name, only in chosen.items()}
        if sort is not None:
            listed = {name: tables[name].sorted(rows, sort) for name, rows in listed.items()}
        print(show_table.format_csv({name: (tables[name], rows) for name, rows in listed.items()}), end="")
    else:
        options: dict[str, Any] = {"by": by, "depth": depth, "sort": sort} | show_table.terminal_options()
        texts = {
            name: show_table.format_table(tables[name], main, only=only, **options) for name, only in chosen.items()
        }
        print(format_headings(texts))


def _chosen(tables: Mapping[str, Table], selectors: list[str]) -> dict[str, Selection | None]:
    """The tables that have any of the calls that selectors pick, with those; all without selectors."""
    from modelexport.core.selectors import select_calls

    if not selectors:
        return dict.fromkeys(tables)
    chosen: dict[str, Selection | None] = {}
    failure: UsageError | None = None
    for name, table in tables.items():
        try:
            chosen[name] = select_calls(selectors, table.calls, table.tags, where=table.name)
        except UsageError as error:
            failure = error
    if not chosen and failure is not None:
        raise failure
    return chosen

"""Figures by module: `cost`, `profile`, `report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from modelexport.cli.options import FileArgument, JsonOption, ModelClassOption, RemoteCodeOption, SeedOption
from modelexport.cli.running import load_with_inputs, print_json, progress_shown
from modelexport.errors import UsageError

if TYPE_CHECKING:
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
    Path | None, typer.Option("--html", metavar="OUT.html", help="Also write an interactive page that works offline.")
]
NodeDataOption = Annotated[
    Path | None, typer.Option("--node-data", metavar="OUT.json", help="Also write node data for Model Explorer.")
]


def cost(
    file: FileArgument,
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
    from modelexport.measure.costs import cost as run

    sizes = _sizes(size or [])
    with progress_shown() as progress, Stages(progress)("cost"):
        table = run(file, sizes)
    show(table, "flops", selectors, by, depth, sort, as_csv=as_csv, html=html, node_data=node_data, as_json=as_json)


def profile(
    file: FileArgument,
    selectors: SelectorsOption = None,
    inputs: Annotated[
        Path | None,
        typer.Option("--inputs", metavar="FILE", help="Arrays by name: .npz, .safetensors, or a JSON description."),
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
        Path | None, typer.Option("--against", metavar="OTHER.onnx", help="Another tagged file of the same model.")
    ] = None,
    against_torch: Annotated[
        str | None, typer.Option("--against-torch", metavar="MODEL", help="Compare with the same model in PyTorch.")
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
    from modelexport.measure import profiles

    if against is not None and against_torch is not None:
        raise UsageError("give --against or --against-torch, not both")
    how: dict[str, Any] = {"runs": runs, "warmup": warmup, "level": level, "provider": provider, "seed": seed}
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
            measured = profiles.profile(file, given, sizes=_sizes(size or []), **how)
        if against is not None:
            with stages(f"run {against.name}"):
                other = profiles.profile(against, measured.feeds, **how)
            measured = profiles.profile_against(measured, other)
        elif against_torch is not None:
            from modelexport.pytorch.timing import time_calls

            with stages("run PyTorch"):
                seconds = time_calls(loaded.model, example, runs=runs, warmup=warmup)
            measured = profiles.profile_beside(measured, seconds, "PyTorch")
    facts = {"run": measured.facts} | ({"against": measured.against} if measured.against is not None else {})
    more = msgspec.to_builtins(facts)
    show(
        measured.table,
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
    file: FileArgument,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT.html", help="The page to write.")],
    size: Annotated[
        list[str] | None, typer.Option("--size", metavar="NAME=N", help="The size of a dynamic axis.")
    ] = None,
    profiled: Annotated[bool, typer.Option("--profile", help="Also run it, and show the time of each module.")] = False,
) -> None:
    """Write the tree of FILE, its coverage, its verification and its cost to one page."""
    from modelexport.core.stages import Stages
    from modelexport.verify.page import write_report_page

    with progress_shown() as progress:
        stages = Stages(progress)
        with stages("report"):
            write_report_page(file, output, sizes=_sizes(size or []), profiled=profiled)
    print(output)


def show(
    table: Table,
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
    more: dict[str, Any] | None = None,
) -> None:
    """Write a table in all requested formats."""
    from modelexport.cli import show_table
    from modelexport.core.selectors import select_calls

    if as_csv and as_json:
        raise UsageError("give --csv or --json, not both")
    only = select_calls(selectors, table.calls, table.tags, where=table.name) if selectors else None
    if sort is not None:
        table.column(sort)
    if node_data is not None:
        from modelexport.measure.node_data import write_node_data

        write_node_data(table, node_data, column=main)
    if html is not None:
        from modelexport.measure.page import write_page

        write_page(table, html, main=main)
    if as_json:
        print_json(table.document(by, depth=depth, only=only, sort=sort) | (more or {}))
    elif as_csv:
        rows = table.rows(by, depth=depth, only=only)
        print(show_table.format_csv(table, table.sorted(rows, sort) if sort is not None else rows), end="")
    else:
        show_table.print_table(table, main, by=by, depth=depth, only=only, sort=sort)


def _sizes(texts: list[str]) -> dict[str, int]:
    sizes = {}
    for text in texts:
        name, _, number = text.partition("=")
        if not name or not number.isdecimal() or int(number) < 1:
            raise UsageError(f"'{text}' is not NAME=N: give the name of a dynamic axis and its size, as in batch=8")
        sizes[name] = int(number)
    return sizes

"""What acts on modules in a file: `split`, `replace`, `place`, `rename`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from modelexport.cli.options import FileArgument, JsonOption
from modelexport.cli.running import print_json
from modelexport.surgery import Sharing

SharingOption = Annotated[
    Sharing,
    typer.Option(
        "--weights",
        help="Weights in files of their own: link them beside the output, copy what is used, or whichever can.",
    ),
]
By = Literal["bytes", "flops", "time"]


def split(
    file: FileArgument,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="The folder to write.")],
    stages: Annotated[int | None, typer.Option(metavar="N", min=1, help="How many stages.")] = None,
    max_mb: Annotated[
        float | None, typer.Option("--max-mb", metavar="M", help="Largest weights of a stage, in millions of bytes.")
    ] = None,
    at: Annotated[
        list[str] | None,
        typer.Option("--at", metavar="SELECTOR", help="A stage begins here; with --stages, nowhere else."),
    ] = None,
    by: Annotated[By, typer.Option(help="What the stages are balanced by.")] = "bytes",
    weights: SharingOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Cut FILE at module boundaries into stages that run one after the other."""
    from modelexport.cli import show_surgery
    from modelexport.surgery.splitting import split as run
    from modelexport.tagged.file import read_tagged

    result = run(
        read_tagged(file),
        output,
        stages=stages,
        max_bytes=None if max_mb is None else int(max_mb * 1e6),
        at=at or (),
        by=by,
        weights=weights,
    )
    if as_json:
        print_json(result)
    else:
        print(show_surgery.format_split(result))

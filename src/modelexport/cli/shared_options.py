"""Options shared by several commands."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from modelexport.cli.read_and_written import READ, READ_MODEL, WRITTEN
from modelexport.errors import UsageError

MODEL_HELP = (
    "A Hugging Face directory or hub name, package.module:factory, file.py:factory (a callable that returns the "
    "module, or the module and its inputs), or bert-tiny, the built-in example."
)
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP), READ_MODEL]
FileArgument = Annotated[Path, typer.Argument(metavar="FILE.onnx", help="A tagged ONNX file."), READ]
FileOrFolderArgument = Annotated[
    Path, typer.Argument(metavar="FILE.onnx|FOLDER/", help="A tagged ONNX file, or a package of several."), READ
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
SelectorsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="SELECTOR...",
        help="Calls: encoder.layer.0 (. is the root, path@1 a second call), encoder.layer.[0-3], *.dense, a tag, "
        "class:LayerNorm; !SELECTOR removes calls.",
    ),
]
InputsOption = Annotated[
    Path | None,
    typer.Option(
        "--inputs", metavar="SPEC.json", help='Example inputs: {"name": {"dtype", "shape", "range"|"value"}}.'
    ),
    READ,
]
OutputOption = Annotated[Path, typer.Option("-o", "--output", metavar="OUT.onnx", help="The file to write."), WRITTEN]


_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([kMG]i?)?B?")
_UNITS = {None: 1, "k": 10**3, "M": 10**6, "G": 10**9, "ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def parsed_bytes(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"'{text}' is not a size: write a number of bytes, kB, MB or GB, as in 25MB")
    return round(float(found[1]) * _UNITS[found[2]])


def parsed_sizes(texts: Iterable[str]) -> dict[str, int]:
    sizes = {}
    for text in texts:
        name, _, number = text.partition("=")
        if not name or not number.isdecimal() or int(number) < 1:
            raise UsageError(f"'{text}' is not NAME=N: give the name of a dynamic axis and its size, as in batch=8")
        sizes[name] = int(number)
    return sizes

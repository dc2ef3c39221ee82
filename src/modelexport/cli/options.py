"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modelexport.core.tags import Granularity

MODEL_HELP = (
    "A Hugging Face directory or hub name, package.module:factory, file.py:factory (a callable that returns the "
    "module, or the module and its inputs), or bert-tiny, the built-in example."
)
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
FileArgument = Annotated[Path, typer.Argument(metavar="FILE.onnx", help="A tagged ONNX file.")]
FileOrFolderArgument = Annotated[
    Path, typer.Argument(metavar="FILE.onnx|FOLDER/", help="A tagged ONNX file, or a package of several.")
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
]
ModelClassOption = Annotated[str | None, typer.Option(help="The transformers class to load a directory with.")]
RemoteCodeOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run code from the model's repository.")]
DtypeOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="float32, float16, bfloat16: convert the weights while loading.")
]
SeedOption = Annotated[int, typer.Option(help="The seed of random weights and inputs.")]
IncludeOption = Annotated[
    list[str] | None, typer.Option("--include", metavar="CLASS", help="A class that gets a segment in tags as well.")
]
ExcludeOption = Annotated[
    list[str] | None, typer.Option("--exclude", metavar="CLASS", help="A class that does not get a segment in tags.")
]
GranularityOption = Annotated[
    Granularity, typer.Option(help="The modules that get a segment: model classes, all, or as fits the model.")
]
OutputOption = Annotated[Path, typer.Option("-o", "--output", metavar="OUT.onnx", help="The file to write.")]

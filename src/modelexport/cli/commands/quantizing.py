"""Precision by module: `quantize`, and `select` for those who quantize with another tool."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from modelexport.cli.guards import READ, WRITTEN
from modelexport.cli.options import FileArgument, FileOrFolderArgument, JsonOption, SelectorsArgument
from modelexport.cli.progress import LINE
from modelexport.cli.running import print_json
from modelexport.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Which module gets which method: --to with --keep or --only, or --recipe"""

    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="METHOD",
            help="int8-dynamic, int8-static, int8-weights, int4, float16, bfloat16; with options as in int4:block=64.",
        ),
    ] = None
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="SELECTOR", help="Modules that stay bit for bit what they are."),
    ] = None
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="SELECTOR", help="The modules to quantize; the others are kept."),
    ] = None
    recipe: Annotated[
        Path | None,
        typer.Option("--recipe", metavar="RECIPE.yaml", help="Rules of selector and method; the first match wins."),
        READ,
    ] = None


@dataclass(frozen=True, kw_only=True)
class Data:
    """Inputs for methods that measure ranges"""

    data: Annotated[
        Path | None,
        typer.Option(
            "--data", metavar="DATA", help=".npz, .safetensors, .jsonl, text (a run a line), a folder of images."
        ),
        READ,
    ] = None
    processor: Annotated[
        Path | None,
        typer.Option("--processor", metavar="FOLDER", help="Where tokenizer.json is, if not beside FILE."),
        READ,
    ] = None


def quantize(
    file: FileOrFolderArgument,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="OUT.onnx|OUT/", help="The file or folder to write."), WRITTEN
    ],
    *,
    rules: Rules,
    calibration: Data,
    no_runtime_check: Annotated[
        bool, typer.Option("--no-runtime-check", help="The result is for a runtime that has other kernels.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Quantize modules of FILE by ONNX Runtime's quantizers; all others stay bit for bit what they are."""
    from modelexport.cli import show_quantized
    from modelexport.core.stages import Stages
    from modelexport.packages.quantized_packages import quantize_package
    from modelexport.precision.quantize import quantize as run

    given: dict[str, Any] = {
        "to": rules.to,
        "keep": rules.keep or (),
        "only": rules.only or (),
        "recipe": rules.recipe,
        "data": calibration.data,
        "processor": calibration.processor,
        "check_runtime": not no_runtime_check,
    }
    with Stages(LINE.tell)(f"quantize to {rules.to or rules.recipe}"):
        results = quantize_package(file, output, **given) if file.is_dir() else {"": run(file, output, **given)}
    if as_json:
        print_json({"parts": results} if file.is_dir() else results[""])
    else:
        print(show_quantized.format_quantized(results, file, output))


def select(
    file: FileArgument,
    selectors: SelectorsArgument,
    form: Annotated[
        str, typer.Option("--as", metavar="TOOL", help="ort, modelopt, olive, trt or nncf: the form that it takes.")
    ],
) -> None:
    """Print the nodes of modules in the form that another tool's option takes, to exclude or include them there."""
    from modelexport.core.text import nearest
    from modelexport.precision.exclusions import FORMS, excluded
    from modelexport.tagged.file import read_tagged

    if form not in FORMS:
        raise UsageError(f"there is no form '{form}'{nearest(form, FORMS)}; the forms are {', '.join(FORMS)}")
    print(excluded(read_tagged(file), selectors, form), end="")

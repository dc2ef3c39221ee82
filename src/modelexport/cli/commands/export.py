"""`export`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from modelexport.cli.name_and_axis_options import NamedParts, NameOptions, read_interface
from modelexport.core.declared_options import option
from modelexport.core.timed_stages import Stages
from modelexport.errors import LimitedFileWarning, UsageError
from modelexport.exporting.options import Options
from modelexport.terminal.model_argument import Loading, ModelChoice, load_for_package
from modelexport.terminal.printing import print_result
from modelexport.terminal.progress import stages_on_line
from modelexport.terminal.shared_options import INPUTS, JSON, MODEL
from modelexport.tools import function_of_option

if TYPE_CHECKING:
    from modelexport.exporting.export_result import ExportResult


def export(
    output: str = option(
        ..., "The file to write, or a package.", flag="-o --output", metavar="FILE.onnx|FOLDER/", file="written"
    ),
    model: str = MODEL,
    inputs: Path | None = INPUTS,
    *,
    names: NameOptions,
    options: Options,
    loading: Loading,
    report: bool = option(
        False, "Also write the page of `modelexport report`, OUT.html beside OUT.onnx, with the result of --verify."
    ),
    as_json: bool = JSON,
) -> None:
    """Export MODEL to a file, or to a folder with all of its parts; without MODEL, bert-tiny."""
    choice = ModelChoice(model, inputs, loading)
    write_page = function_of_option("export --report") if report else None
    if (named := names.named) != NamedParts():
        if options.package.parts is not None:
            raise UsageError("--parts finds parts, and --part names them: give one of the two")
        if Path(output).suffix == ".onnx":
            raise UsageError(f"{output} is a file, and parts are a folder: give {Path(output).with_suffix('')}/")
        options = replace(options, package=replace(options.package, parts=named.parts()))
    if options.package.parts is not None or output.endswith("/") or Path(output).is_dir():
        if replace(names, named=NamedParts()) != NameOptions():
            raise UsageError(
                "--axes, --input-names, --output-names and --outputs go with a FILE.onnx: "
                "the names in a package are fixed by its runtimes"
            )
        export_folder(choice, Path(output), options, write_page=write_page, as_json=as_json)
        return
    if ".onnx" not in Path(output).suffixes:  # it could be meant as a folder
        raise UsageError(f"{output} does not end in .onnx: give {output}.onnx, or for a package a folder, {output}/")
    from modelexport.cli import show_export
    from modelexport.files.replaceable_files import check_writable

    options.check_together()
    page = Path(output).with_suffix(".html")
    if write_page is not None:
        check_writable(page, alone=True)
    stages = stages_on_line()
    result = _export_file(choice, output, names, options, stages)
    if write_page is not None:
        with stages("report"):
            write_page(result.path, page, verified={"": result.verified})
    show_export.print_warnings(result, options)
    text = show_export.format_export(result, page if report else None)
    print_result(show_export.export_document(result), lambda: text, as_json=as_json)
    failed = result.check is not None and result.check.status == "failed"
    if failed or (result.verified is not None and not result.verified.agrees):
        raise typer.Exit(1)


def _export_file(
    choice: ModelChoice, output: str, names: NameOptions, options: Options, stages: Stages
) -> ExportResult:
    """The result; its remarks are what the model computes if its class does not say it, and inputs that nobody gave."""
    from modelexport.exporting.pipeline import export as run

    interface = read_interface(names)
    loaded, example = choice.load(stages, weights="files" if options.weights.weights == "link" else "auto")
    options.quantized.check_model(loaded.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LimitedFileWarning)  # the lines that the command prints say it
        return run(
            loaded.model,
            example,
            output,
            name=loaded.name,
            options=options,
            stages=stages,
            interface=interface,
            dynamic=options.capture.dynamic or bool(names.axes),
            source=loaded.weights,
            remarks=_remarks(choice, loaded, example),
        )


def _remarks(choice: ModelChoice, loaded: Any, example: Any) -> list[str]:
    """What has to be known about the model, and that inputs were generated if none were given."""
    from modelexport.pytorch.inputs.generated_inputs import describe

    about = [loaded.about] if loaded.about else []
    if choice.inputs is not None or loaded.inputs is not None:
        return about
    if isinstance(example, Mapping):
        return [*about, f"inputs were generated: {describe(example)}; give others with --inputs"]
    return [*about, "the parts were run with generated inputs"]


def export_folder(
    choice: ModelChoice, folder: Path, options: Options, *, write_page: Callable[..., None] | None, as_json: bool
) -> None:
    """Export a model to a package, and print what was written."""
    from modelexport.cli import show_package
    from modelexport.core.garbage_collection import only_new_garbage
    from modelexport.files.output_folders import check_package_folder
    from modelexport.packages.package_export import export_package

    options.check_together(package=True)
    check_package_folder(folder, [Path(choice.model)])
    stages = stages_on_line()
    loaded, example = load_for_package(choice, options.package.parts or "auto", stages)
    options.quantized.check_model(loaded.model)
    with only_new_garbage():
        result = export_package(
            loaded.model,
            folder,
            inputs=example,
            name=loaded.name,
            directory=loaded.directory,
            options=options,
            source=loaded.weights,
            stages=stages,
        )
    result = replace(result, notes=[*_remarks(choice, loaded, example), *result.notes])
    page = folder / "report.html"
    if write_page is not None:
        with stages("report"):
            write_page(folder, page, verified={name: part.verified for name, part in result.parts.items()})
    text = show_package.format_package(result, choice.model, None if write_page is None else page)
    print_result(show_package.package_document(result), lambda: text, as_json=as_json)
    if not result.agrees:
        raise typer.Exit(1)

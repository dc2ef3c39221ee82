"""`export`, and commands that show a model without exporting it: `hierarchy`, `inputs`, `internals`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from modelexport.cli.interface_options import NameOptions, read_interface
from modelexport.cli.model_choice import Loading, ModelChoice, load_for_package
from modelexport.cli.printing import print_result
from modelexport.cli.progress import LINE
from modelexport.cli.shared_options import INPUTS, JSON, MODEL
from modelexport.core.declared_options import option
from modelexport.core.stages import Stages
from modelexport.errors import UsageError
from modelexport.exporting.options import LevelOptions, Options

if TYPE_CHECKING:
    from modelexport.exporting.result import ExportResult

HierarchyView = Literal["static", "traced", "compare"]
EVERY_MODULE = LevelOptions(granularity="all")


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
    as_json: bool = JSON,
) -> None:
    """Export MODEL to a file, or to a folder with all of its parts; without MODEL, bert-tiny."""
    choice = ModelChoice(model, inputs, loading)
    if options.package.parts is not None or output.endswith("/") or Path(output).is_dir():
        if names != NameOptions():
            raise UsageError(
                "--axes, --input-names, --output-names and --outputs go with a FILE.onnx: "
                "the names in a package are fixed by its runtimes"
            )
        _export_folder(choice, Path(output), options, as_json=as_json)
        return
    from modelexport.cli import show_export

    options.check_together()
    result = _export_file(choice, output, names, options, Stages(LINE.tell))
    show_export.print_warnings(result, options)
    print_result(show_export.export_document(result), lambda: show_export.format_export(result), as_json=as_json)
    failed = result.check is not None and result.check.status == "failed"
    if failed or (result.verified is not None and not result.verified.agrees):
        raise typer.Exit(1)


def _export_file(
    choice: ModelChoice, output: str, names: NameOptions, options: Options, stages: Stages
) -> ExportResult:
    from modelexport.exporting.interface import widened
    from modelexport.exporting.pipeline import export as run

    interface = read_interface(names)
    loaded, example = choice.load(stages, weights="files" if options.weights.weights == "link" else "auto")
    options.quantized.check_model(loaded.model)
    return run(
        loaded.model,
        widened(example, interface) if isinstance(example, Mapping) else example,
        output,
        name=loaded.name,
        options=options,
        stages=stages,
        interface=interface,
        dynamic=options.capture.dynamic or bool(names.axes),
        source=loaded.weights,
    )


def _export_folder(choice: ModelChoice, folder: Path, options: Options, *, as_json: bool) -> None:
    """Export a model to a package, and print what was written."""
    from modelexport.cli import show_package
    from modelexport.core.garbage import only_new_garbage
    from modelexport.files.package_folders import check_package_folder
    from modelexport.packages.packaging import export_package

    options.check_together(package=True)
    check_package_folder(folder, [Path(choice.model)])
    stages = Stages(LINE.tell)
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
    print_result(show_package.package_document(result), lambda: show_package.format_package(result), as_json=as_json)
    if not result.agrees:
        raise typer.Exit(1)


def hierarchy(
    model: str = MODEL,
    mode: HierarchyView = option("static", "What to show."),
    trace: bool = option(False, "Show every step of the traced run on a line."),
    inputs: Path | None = INPUTS,
    *,
    levels: LevelOptions = EVERY_MODULE,
    loading: Loading,
    as_json: bool = JSON,
) -> None:
    """Show the module tree of MODEL; nothing is exported."""
    from modelexport.cli.show_hierarchy import HierarchyMode, format_hierarchy
    from modelexport.pytorch.overview import hierarchy as run

    runs = trace or mode != "static"
    stages = Stages(LINE.tell)
    loaded, example = ModelChoice(model, inputs, loading).load(stages, make_inputs=runs)
    with stages("trace"):
        overview = run(loaded.model, example if runs else None, **dataclasses.asdict(levels), timed=runs and as_json)
    shown: HierarchyMode = "trace" if trace else mode
    print_result(overview.document(), lambda: format_hierarchy(shown, overview), as_json=as_json)


def inputs(
    model: str = MODEL,
    spec: Path | None = INPUTS,
    output: Path | None = option(
        None, "Save them: .npz or .safetensors.", flag="-o --output", metavar="OUT", file="written alone"
    ),
    *,
    loading: Loading,
    as_json: bool = JSON,
) -> None:
    """Show the example inputs that MODEL is run with, or save them."""
    from modelexport.cli.show_export import format_inputs

    stages = Stages(LINE.tell)
    _, example = ModelChoice(model, spec, loading).load(stages)
    from modelexport.pytorch.example_inputs import describe_inputs, save_inputs

    if output is not None:
        save_inputs(example, output)
    described = describe_inputs(example)
    print_result(described, lambda: format_inputs(described), as_json=as_json)


def internals(model: str = MODEL, inputs: Path | None = INPUTS, *, loading: Loading, as_json: bool = JSON) -> None:
    """Show what PyTorch's own exporters record about MODEL's modules; nothing is written."""
    from modelexport.cli.show_internals import format_internals

    stages = Stages(LINE.tell)
    loaded, example = ModelChoice(model, inputs, loading).load(stages)
    from modelexport.capture.internals.exporters import study

    with stages("export"):
        found = study(loaded.model, example, loaded.name)
    print_result(found, lambda: format_internals(found), as_json=as_json)

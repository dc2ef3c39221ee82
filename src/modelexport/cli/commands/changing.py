"""Commands that change a file: `strip`, `inline`, `adopt`, `retag`, `optimize`, `update-weights`, `extract`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from modelexport.cli.printing import print_parts, print_result
from modelexport.cli.progress import LINE
from modelexport.cli.shared_options import FILE, FILE_OR_FOLDER, JSON, OUTPUT
from modelexport.core.declared_options import argument, option
from modelexport.errors import UsageError


def strip(file: Path = FILE, output: Path = OUTPUT) -> None:
    """Convert a file with tags as attributes to one with tags as metadata, which ONNX Runtime accepts."""
    from modelexport.tagged.flattening import strip as run

    run(file, output)
    print(output)


def inline(file: Path = FILE, output: Path = OUTPUT) -> None:
    """Convert a file with a function for each module to a flat one."""
    from modelexport.tagged.flattening import inline as run

    run(file, output)
    print(output)


def adopt(
    file: Path = argument(..., "An ONNX file of another exporter.", metavar="FILE.onnx", file="read"),
    output: Path = OUTPUT,
    keep_torch_metadata: bool = option(False, "Keep pkg.torch.* keys, which contain paths of the exporting machine."),
    as_json: bool = JSON,
) -> None:
    """Make a tagged file from one that another exporter wrote, using the information that it left in the file."""
    from modelexport.cli import show_changed
    from modelexport.lineage.adoption import adopt as run

    adopted = run(file, output, keep_torch_metadata=keep_torch_metadata)
    print_result(show_changed.adopted_document(adopted), lambda: show_changed.format_adopted(adopted), as_json=as_json)


def retag(
    changed: Path = argument(
        ..., "The file that a tool made from TAGGED.", metavar="CHANGED.onnx|CHANGED/", file="read"
    ),
    source: Path = option(
        ..., "The file that the tool read.", flag="--from", metavar="TAGGED.onnx|TAGGED/", file="read"
    ),
    output: Path = OUTPUT,
    as_json: bool = JSON,
) -> None:
    """Restore the tags of a file that another tool changed."""
    from modelexport.cli import show_changed
    from modelexport.lineage.retagging import retag as run
    from modelexport.packages.changed_packages import retag_package

    if source.is_dir() != changed.is_dir():
        raise UsageError(f"{changed} and {source} are a file and a folder: give two files, or two folders")
    if source.is_dir():
        reports = retag_package(changed, source=source, output=output)
    else:
        reports = {"": run(changed, source=source, output=output)}
    print_parts(reports, show_changed.format_retag, as_json=as_json)


def optimize(
    file: Path = FILE,
    tool: str = option(..., "ort-extended, onnxslim, float16, ...", flag="--with", metavar="TOOL"),
    output: Path = OUTPUT,
    as_json: bool = JSON,
) -> None:
    """Run another package's optimizer, quantizer or converter on FILE, and restore the tags in the result."""
    from modelexport.cli import show_changed
    from modelexport.core.stages import Stages
    from modelexport.lineage.tools import optimize_file as run

    with Stages(LINE.tell)(tool):
        report = run(file, tool, output)
    print_result(report, lambda: show_changed.format_retag(report), as_json=as_json)


def update_weights(
    file: Path = FILE_OR_FOLDER,
    output: Path = option(
        ..., "The file to write.", flag="-o --output", metavar="OUT.onnx|OUT.onnx_adapter", file="written"
    ),
    weights: Path | None = argument(
        None, "A state_dict of the same module.", metavar="WEIGHTS.safetensors", file="read"
    ),
    adapter: Sequence[str] = option(
        (), "A LoRA adapter that PEFT wrote, to add to the weights.", metavar="DIR", file="read"
    ),
    as_inputs: bool = option(False, "Let FILE take adapters as inputs, and write each as .onnx_adapter."),
    strict: bool = option(False, "Refuse entries that the module does not have."),
    as_json: bool = JSON,
) -> None:
    """Put other weights of the same shapes, or LoRA adapters, into FILE, without exporting again."""
    from modelexport.packages.changed_packages import update_package
    from modelexport.weights.updates import update_weights as run

    if adapter or as_inputs:
        if strict:
            raise UsageError("--strict goes with WEIGHTS.safetensors alone")
        _adapt(file, output, weights, adapter, as_inputs, as_json)
        return
    if weights is None:
        raise UsageError("give WEIGHTS.safetensors, or --adapter DIR")
    result = update_package(file, weights, output) if file.is_dir() else run(file, weights, output, strict=strict)
    told = (
        f"{result.path}: {result.used} entries in {result.replaced} initializers, {result.transformed} of them "
        f"transformed; {result.unused} entries not used, {result.kept} constants kept"
    )
    print_result(result, lambda: told, as_json=as_json)


def _adapt(
    file: Path, output: Path, weights: Path | None, adapters: Sequence[str], as_inputs: bool, as_json: bool
) -> None:
    """Merge adapters, let a file take them as inputs, or write one for a file that does."""
    from modelexport.cli import show_changed
    from modelexport.packages.changed_packages import merge_adapters_into_package
    from modelexport.runtime.adapter_files import ADAPTER_SUFFIX
    from modelexport.surgery import adapting

    if file.is_dir() and (as_inputs or weights is not None or output.suffix == ADAPTER_SUFFIX):
        raise UsageError(f"into {file}, a folder, adapters can only be merged: name one of its parts for the rest")
    if as_inputs and (weights is not None or not adapters):
        raise UsageError("--as-inputs takes adapters and no weights: give --adapter DIR")
    if output.suffix == ADAPTER_SUFFIX:
        if weights is not None or as_inputs or len(adapters) != 1:
            raise UsageError(f"{output} is made of one adapter: give FILE and one --adapter DIR alone")
        written = adapting.write_adapter(file, adapters[0], output)
        print_result(written, lambda: show_changed.format_adapter_file(written), as_json=as_json)
        return
    result: adapting.MergedAdapters | adapting.AdapterInputs
    if file.is_dir():
        result = merge_adapters_into_package(file, adapters, output)
    elif as_inputs:
        result = adapting.adapters_as_inputs(file, adapters, output)
    else:
        result = adapting.merge_adapters(file, adapters, output, weights=weights)
    print_result(result, lambda: show_changed.format_adapted(result), as_json=as_json)


def extract(
    file: Path = FILE_OR_FOLDER,
    output: Path = option(
        ..., "The file to write; a folder for several calls.", flag="-o --output", metavar="SUB.onnx", file="written"
    ),
    modules: Sequence[str] = argument((), "Modules: address, glob, tag, class:NAME.", metavar="SELECTOR"),
    each: str | None = option(None, "Every call of modules of CLASS.", metavar="CLASS"),
    as_json: bool = JSON,
) -> None:
    """Write module calls as models of their own."""
    from modelexport.cli import show_export
    from modelexport.surgery import extraction as cutting
    from modelexport.tagged.file import read_tagged
    from modelexport.tagged.package import parts_with

    if bool(modules) == bool(each):
        raise UsageError("name the calls to extract, or a class with --each")
    # Of a package, the first part that runs it.
    tagged = read_tagged(next(iter(parts_with(file, modules[0] if modules else ".").values())))
    if each:
        extracted = cutting.extract_all(tagged, [f"class:{each}"], output)
    elif len(calls := tagged.select(*modules).calls) > 1:
        extracted = cutting.extract_all(tagged, modules, output)
    else:
        extracted = [cutting.extract(tagged, str(calls[0]), output)]
    print_result(extracted, lambda: show_export.format_extracted(extracted), as_json=as_json)

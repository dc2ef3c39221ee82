"""`extract`, and `update-weights` with weights and LoRA adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from modelexport.cli.printing import print_result
from modelexport.cli.shared_options import FILE_OR_FOLDER, JSON
from modelexport.core.declared_options import argument, option
from modelexport.errors import UsageError


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
    as_inputs: bool = option(False, "Give FILE optional inputs for adapters, and write each adapter as .onnx_adapter."),
    strict: bool = option(False, "Refuse entries that the module does not have."),
    as_json: bool = JSON,
) -> None:
    """Replace the weights of FILE by others of the same shapes, or add LoRA adapters, without a new export."""
    from modelexport.packages.changed_packages import update_package
    from modelexport.weights.weight_updates import update_weights as run

    if adapter or as_inputs:
        if strict:
            raise UsageError("--strict goes with WEIGHTS.safetensors alone")
        _adapt(file, output, weights, adapter, as_inputs, as_json)
        return
    if weights is None:
        raise UsageError("give WEIGHTS.safetensors, or --adapter DIR")
    if weights.suffix == ".onnx":
        raise UsageError(f"{weights} is a model, not weights: give update-weights {weights} {file}")
    result = update_package(file, weights, output) if file.is_dir() else run(file, weights, output, strict=strict)
    text = (
        f"{result.path}: {result.used} entries in {result.replaced} initializers, {result.transformed} of them "
        f"transformed; {result.unused} entries not used, {result.kept} constants kept"
    )
    print_result(result, lambda: text, as_json=as_json)


def _adapt(
    file: Path, output: Path, weights: Path | None, adapters: Sequence[str], as_inputs: bool, as_json: bool
) -> None:
    """Merge adapters, let a file take them as inputs, or write one for a file that does."""
    from modelexport.cli import show_changed
    from modelexport.packages.changed_packages import merge_adapters_into_package
    from modelexport.runtime.onnx_adapter_files import ADAPTER_SUFFIX
    from modelexport.surgery import lora_adapters

    if file.is_dir() and (as_inputs or weights is not None or output.suffix == ADAPTER_SUFFIX):
        raise UsageError(f"into {file}, a folder, adapters can only be merged: name one of its parts for the rest")
    if as_inputs and (weights is not None or not adapters):
        raise UsageError("--as-inputs takes adapters and no weights: give --adapter DIR")
    if output.suffix == ADAPTER_SUFFIX:
        if weights is not None or as_inputs or len(adapters) != 1:
            raise UsageError(f"{output} is made of one adapter: give FILE and one --adapter DIR alone")
        written = lora_adapters.write_adapter(file, adapters[0], output)
        print_result(written, lambda: show_changed.format_adapter_file(written), as_json=as_json)
        return
    result: lora_adapters.MergedAdapters | lora_adapters.AdapterInputs
    if file.is_dir():
        result = merge_adapters_into_package(file, adapters, output)
    elif as_inputs:
        result = lora_adapters.adapters_as_inputs(file, adapters, output)
    else:
        result = lora_adapters.merge_adapters(file, adapters, output, weights=weights)
    print_result(result, lambda: show_changed.format_adapted(result), as_json=as_json)


def extract(
    file: Path = FILE_OR_FOLDER,
    output: Path = option(
        ...,
        "The file to write; a folder for several calls.",
        flag="-o --output",
        metavar="SUB.onnx",
        file="written file or folder",
    ),
    modules: Sequence[str] = argument((), "Modules: address, glob, tag, class:NAME.", metavar="SELECTOR"),
    each: str | None = option(None, "Every call of modules of CLASS.", metavar="CLASS"),
    to_values: Sequence[str] = option(
        (), "Instead of a module: the nodes that compute this value of the file.", flag="--to", metavar="VALUE"
    ),
    from_values: Sequence[str] = option(
        (),
        "With --to: only the nodes after this value, which becomes an input of SUB.onnx.",
        flag="--from",
        metavar="VALUE",
    ),
    as_json: bool = JSON,
) -> None:
    """Write module calls, or the nodes between values, as separate models."""
    from modelexport.cli import show_changed
    from modelexport.surgery import extraction as cutting
    from modelexport.tagged.file import read_tagged
    from modelexport.tagged.package import parts_with

    if bool(modules) + bool(each) + bool(to_values) != 1 or (from_values and not to_values):
        raise UsageError("name the calls to extract, or a class with --each, or values with --to and --from")
    # Of a package, the first part that runs it.
    tagged = read_tagged(next(iter(parts_with(file, modules[0] if modules else ".").values())))
    if to_values:
        extracted = [cutting.extract_values(tagged, to_values, output, inputs=from_values)]
    elif (each or len(tagged.select(*modules).calls) > 1) and output.suffix == ".onnx" and not output.is_dir():
        raise UsageError(f"{output} would be a folder of several files: give {output.with_suffix('')}/")
    elif each:
        extracted = cutting.extract_all(tagged, [f"class:{each}"], output)
    elif len(calls := tagged.select(*modules).calls) > 1:
        extracted = cutting.extract_all(tagged, modules, output)
    elif not output.suffix:
        raise UsageError(f"{output} has no suffix, and one call is one file: give {output}.onnx")
    else:
        extracted = [cutting.extract(tagged, str(calls[0]), output)]
    print_result(extracted, lambda: show_changed.format_extracted(extracted), as_json=as_json)

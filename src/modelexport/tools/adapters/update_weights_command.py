"""`update-weights`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from modelexport.core.declared_options import argument, option
from modelexport.errors import UsageError
from modelexport.terminal.printing import print_result
from modelexport.terminal.shared_options import FILE_OR_FOLDER, JSON


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
        swapped = f"update-weights {weights} {file}" if file.suffix == ".safetensors" else "a .safetensors file"
        raise UsageError(f"{weights} is a model, not weights: give {swapped}")
    result = (update_package if file.is_dir() else run)(file, weights, output, strict=strict)
    text = (
        f"{result.path}: {result.used} entries in {result.replaced} initializers, {result.transformed} of them "
        f"transformed; {result.unused} entries not used, {result.kept} constants kept"
    )
    print_result(result, lambda: text, as_json=as_json)


def _adapt(
    file: Path, output: Path, weights: Path | None, adapters: Sequence[str], as_inputs: bool, as_json: bool
) -> None:
    """Merge adapters, let a file take them as inputs, or write one for a file that does."""
    from modelexport.tools.adapters import adapter_text, lora_adapters
    from modelexport.tools.adapters.merged_packages import merge_adapters_into_package
    from modelexport.tools.adapters.onnx_adapter_files import ADAPTER_SUFFIX

    if file.is_dir() and (as_inputs or weights is not None or output.suffix == ADAPTER_SUFFIX):
        raise UsageError(f"into {file}, a folder, adapters can only be merged: name one of its parts for the rest")
    if as_inputs and (weights is not None or not adapters):
        raise UsageError("--as-inputs takes adapters and no weights: give --adapter DIR")
    if output.suffix == ADAPTER_SUFFIX:
        if weights is not None or as_inputs or len(adapters) != 1:
            raise UsageError(f"{output} is made of one adapter: give FILE and one --adapter DIR alone")
        written = lora_adapters.write_adapter(file, adapters[0], output)
        print_result(written, lambda: adapter_text.format_adapter_file(written), as_json=as_json)
        return
    result: lora_adapters.MergedAdapters | lora_adapters.AdapterInputs
    if file.is_dir():
        result = merge_adapters_into_package(file, adapters, output)
    elif as_inputs:
        result = lora_adapters.adapters_as_inputs(file, adapters, output)
    else:
        result = lora_adapters.merge_adapters(file, adapters, output, weights=weights)
    print_result(result, lambda: adapter_text.format_adapted(result), as_json=as_json)

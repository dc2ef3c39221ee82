"""Quantized packages: one method for each module in all parts, weights once; what a search writes, also of a file."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import onnx_ir as ir

from modelexport.core.timed_stages import Stages
from modelexport.files import onnx_models
from modelexport.files.linked_weights import seal
from modelexport.files.path_or_model import Source, as_path
from modelexport.files.recipe_files import Recipe, encode_recipe
from modelexport.files.replaceable_files import check_written_by_us
from modelexport.format import keys
from modelexport.format.documents import DataFile
from modelexport.graph.bound_tensors import bind_tensors
from modelexport.graph.nodes import initializers
from modelexport.graph.parameter_plans import parameter_plan
from modelexport.graph.properties import record
from modelexport.lineage.retagging import write_retagged
from modelexport.packages.changed_packages import RECIPE, WEIGHTS, moved, only_graph, package_made_from
from modelexport.packages.measured_parts import DECODE, time_parts_in_turns
from modelexport.tables.turns import Turns
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tagged.package import Package, read_package
from modelexport.tools.quantize.executors import Executor
from modelexport.tools.quantize.prepared_for_quantizers import prepared
from modelexport.tools.quantize.quantize import (
    Quantized,
    QuantizeResult,
    check_quantized_writable,
    quantized,
    result_of,
    write_quantized,
)
from modelexport.tools.quantize.recipes import chosen_recipe, of_parts
from modelexport.tools.quantize.search_within_bound import Least, SearchResult, search
from modelexport.traces.calibration_data import RunInputs, given_runs


def quantize_package(
    folder: str | Path,
    output: str | Path,
    *,
    to: str | None = None,
    keep: Iterable[str] = (),
    only: Iterable[str] = (),
    recipe: Recipe | str | Path | None = None,
    data: RunInputs | str | Path | None = None,
    processor: str | Path | None = None,
    check_runtime: bool = True,
) -> dict[str, QuantizeResult]:
    """Quantize modules of a package. A module gets the same method in every part; a selector has to match in one.

    Args:
        folder: The package.
        output: The folder to write.
        to, keep, only, recipe, data, processor, check_runtime: As for :func:`modelexport.quantize`.

    Returns:
        Name of a part to what was written.

    Raises:
        UsageError, FileFormatError, OutputError: As for :func:`modelexport.quantize`.
    """
    folder, output = Path(folder), Path(output)
    package = read_package(folder)
    rules = chosen_recipe(to, keep, only, recipe)
    parts = {name: prepared(read_tagged(file)) for name, file in package.files.items()}
    feeds = None
    if data is not None:
        feeds = given_runs(read_tagged(only_graph(folder)), data, processor or folder)
    return _write_package(
        package,
        output,
        rules,
        parts,
        lambda staging: {
            name: quantized(parts[name], rule, data=feeds, folder=staging)
            for name, rule in of_parts(rules, parts).items()
        },
        check_runtime=check_runtime,
    )


def _write_package(
    package: Package,
    output: Path,
    rules: Recipe,
    parts: Mapping[str, TaggedFile],
    make: Callable[[Path], Mapping[str, Quantized]],
    *,
    check_runtime: bool,
) -> dict[str, QuantizeResult]:
    """Write what is made of the parts of a package, with the weights of each folder in one file, and the recipe.

    Args:
        make: Makes the quantized parts, with files in a folder that are removed again.
    """
    folders: dict[Path, list[str]] = defaultdict(list)
    for entry in package.manifest.parts:
        folders[Path(entry.file).parent].append(entry.name)
    weights = [(place / WEIGHTS).as_posix() for place in folders]
    made_from = replace(package, manifest=msgspec.structs.replace(package.manifest, weights=weights))
    results = {}
    with package_made_from(made_from, output, check=check_runtime) as staging:
        quantized_parts = make(staging)
        for name in package.manifest.weights:
            (staging / name).unlink(missing_ok=True)
        sealed = {
            place: _write_shared_weights([quantized_parts[name].model for name in names], staging / place / WEIGHTS)
            for place, names in folders.items()
        }
        for entry in package.manifest.parts:
            part, save = quantized_parts[entry.name], partial(_save, sealed=sealed[Path(entry.file).parent])
            report = write_retagged(part.model, parts[entry.name], staging / entry.file, save=save)
            results[entry.name] = moved(result_of(report, part), staging, output)
        (staging / RECIPE).write_bytes(encode_recipe(rules))
    return results


def _write_shared_weights(models: Iterable[ir.Model], file: Path) -> DataFile:
    """Write the weights of models to one file, each parameter once, and other tensors once by their content.

    Two parameters that are equal now have a place each: new weights and adapters change one of them alone.

    Returns:
        The record of the file.
    """
    first: dict[object, ir.Value] = {}
    equal: dict[ir.Value, ir.Value] = {}
    for value in (value for model in models for value in initializers(model)):
        tensor = value.const_value
        if tensor is not None and tensor.nbytes >= onnx_models.SMALLEST_OUTSIDE and tensor.dtype != ir.DataType.STRING:
            digest = hashlib.sha256(tensor.tobytes()).digest()
            plan = parameter_plan(value)
            content = (digest, tensor.dtype, tuple(tensor.shape.numpy()))
            equal[value] = first.setdefault((content, tuple(plan.keys) if plan is not None else None), value)
        elif tensor is not None:
            bind_tensors({value: onnx_models.inside_file(tensor, at_once=True)})
    tensors = {value: value.const_value for value in first.values() if value.const_value is not None}
    placed = onnx_models.write_data_file(tensors, file.parent, file.name)
    bind_tensors({value: placed[other] for value, other in equal.items()})
    return seal(file)


def _save(model: ir.Model, path: Path, documents: Mapping[str, bytes], *, sealed: DataFile) -> None:
    """Write a part whose weights are in a file."""
    onnx_models.record_documents(model, documents)
    record(model, keys.WEIGHTS, None)
    record(model, keys.DATA, {WEIGHTS: sealed})
    onnx_models.save_with_references(model, path)


def with_times(
    results: Mapping[str, QuantizeResult], source: Path, output: Path, inputs: Mapping[str, Any] | None, device: str
) -> dict[str, QuantizeResult]:
    """Results with the time of what was written, in turns with that of the source.

    Args:
        results: Name of a part to what was written; a file has no name.
        inputs: Of a file; by default those of its reference values, or random ones.

    Raises:
        ModelExportError: The source does not run here, or no inputs are known.
    """
    times: dict[str, dict[str, Turns]] = defaultdict(dict)
    for use, turns in time_parts_in_turns(source, output, inputs, provider=device).items():
        times[use if use in results else DECODE][use] = turns
    return {name: msgspec.structs.replace(result, times=times[name]) for name, result in results.items()}


class Searched(NamedTuple):
    """What was chosen, and what was written: nothing if the bound is not met, or nothing is faster."""

    found: SearchResult
    written: dict[str, QuantizeResult]
    """Name of a part to what was written; a file has no name."""


def quantize_within(
    file: Source,
    output: str | Path,
    *,
    to: Sequence[str],
    data: RunInputs | str | Path,
    processor: str | Path | None = None,
    check_runtime: bool = True,
    within: str | None = None,
    budget: int | None = None,
    metric: str = "error",
    keep: Iterable[str] = (),
    only: Iterable[str] = (),
    output_name: str | None = None,
    stages: Stages | None = None,
    device: str = "cpu",
    least: Least = "bytes",
    executor: Executor | int | None = None,
) -> Searched:
    """Quantize a file, or a package of one graph, by the methods that :func:`search` finds for its modules.

    Args:
        file: A tagged file, or a package.
        output: The file or the folder to write.
        check_runtime: Load and run the result in the ONNX Runtime of this machine before it is written.
        to, data, processor, within, budget, metric, keep, only, output_name, stages, device, least, executor: As for
            :func:`search`.
            Ranges are measured on the inputs that it chooses by.

    Raises:
        UsageError, FileFormatError, InputsError, OutputError, CheckError: As for :func:`search` and
            :func:`modelexport.quantize`.
    """
    path = as_path(file)
    graph = read_tagged(only_graph(path))
    if path.is_dir():
        check_written_by_us(Path(output) / RECIPE)
    else:
        check_quantized_writable(Path(output), path)
    feeds = given_runs(graph, data, processor)
    result, made, tagged = search(
        graph, to=to, data=feeds if executor is None else data, processor=processor, within=within, budget=budget,
        metric=metric, keep=keep, only=only, output_name=output_name, stages=stages, device=device, least=least,
        executor=executor,
    )  # fmt: skip
    if not result.of_use:
        return Searched(result, {})
    output, rules = Path(output), result.recipe
    if path.is_dir():
        package = read_package(path)
        (name,) = package.files
        written = _write_package(
            package, output, rules, {name: tagged}, lambda staging: {name: made}, check_runtime=check_runtime
        )
    else:
        written = {"": write_quantized(made, tagged, output, rules, feeds, check_runtime=check_runtime)}
    return Searched(result, written)

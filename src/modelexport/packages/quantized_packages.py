"""A package with its modules quantized, by a recipe or within a bound; the weights that parts share are there once."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import onnx_ir as ir

from modelexport.errors import UsageError
from modelexport.files.given_models import Source, as_path
from modelexport.files.linked_weights import record_data
from modelexport.files.onnx_models import (
    SMALLEST_OUTSIDE,
    inside_file,
    record_documents,
    save_with_references,
    write_data_file,
)
from modelexport.format import keys
from modelexport.graph.nodes import initializers
from modelexport.lineage.retagging import write_retagged
from modelexport.packages.changed_packages import moved, package_made_from
from modelexport.precision.quantize import Feeds, QuantizeResult, quantize, quantized, result_of
from modelexport.precision.recipes import Recipe, chosen_recipe, encode_recipe, of_parts
from modelexport.precision.search import SearchResult, search
from modelexport.precision.sensitivity import given_feeds
from modelexport.tagged.file import read_tagged
from modelexport.tagged.package import read_package

RECIPE, WEIGHTS = "recipe.yaml", "weights.data"


def quantize_package(
    folder: str | Path,
    output: str | Path,
    *,
    to: str | None = None,
    keep: Iterable[str] = (),
    only: Iterable[str] = (),
    recipe: Recipe | str | Path | None = None,
    data: Feeds | str | Path | None = None,
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
    parts = {name: read_tagged(file) for name, file in package.files.items()}
    feeds = None
    if data is not None:
        feeds = given_feeds(read_tagged(graph_of(folder)), data, processor or folder)
    folders: dict[Path, list[str]] = defaultdict(list)
    for entry in package.manifest.parts:
        folders[Path(entry.file).parent].append(entry.name)
    weights = [(place / WEIGHTS).as_posix() for place in folders]
    made_from = replace(package, manifest=msgspec.structs.replace(package.manifest, weights=weights))
    results = {}
    with package_made_from(made_from, output) as staging:
        made = {
            name: quantized(parts[name], rule, data=feeds, folder=staging, check=check_runtime)
            for name, rule in of_parts(rules, parts).items()
        }
        for name in package.manifest.weights:
            (staging / name).unlink(missing_ok=True)
        records = {
            place: _share([made[name].model for name in names], staging / place / WEIGHTS)
            for place, names in folders.items()
        }
        for entry in package.manifest.parts:
            one, save = made[entry.name], partial(_save, record=records[Path(entry.file).parent])
            report = write_retagged(one.model, parts[entry.name], staging / entry.file, save=save)
            results[entry.name] = moved(result_of(report, one), staging, output)
        (staging / RECIPE).write_bytes(encode_recipe(rules))
    return results


def _share(models: Iterable[ir.Model], file: Path) -> str:
    """Write the weights of models to one file, each tensor once by its content, and let the models refer to it.

    Returns:
        The record of the file for :data:`.keys.DATA`.
    """
    first: dict[object, ir.Value] = {}
    equal: dict[ir.Value, ir.Value] = {}
    for value in (value for model in models for value in initializers(model)):
        tensor = value.const_value
        if tensor is not None and tensor.nbytes >= SMALLEST_OUTSIDE and tensor.dtype != ir.DataType.STRING:
            digest = hashlib.sha256(tensor.tobytes()).digest()
            equal[value] = first.setdefault((digest, tensor.dtype, tuple(tensor.shape.numpy())), value)
        elif tensor is not None:
            value.const_value = inside_file(tensor, at_once=True)
    tensors = {value: value.const_value for value in first.values() if value.const_value is not None}
    placed = write_data_file(tensors, file.parent, file.name)
    for value, other in equal.items():
        value.const_value = placed[other]
    sealed = ir.Model(ir.Graph([], [], nodes=[]), ir_version=10)
    record_data(sealed, file)
    return sealed.metadata_props[keys.DATA]


def _save(model: ir.Model, path: Path, documents: Mapping[str, bytes], *, record: str) -> None:
    """Write a part whose weights are in a file."""
    record_documents(model, documents)
    model.metadata_props.pop(keys.WEIGHTS, None)
    model.metadata_props[keys.DATA] = record
    save_with_references(model, path)


class Searched(NamedTuple):
    """What was chosen, and what was written: nothing if the bound is not met."""

    found: SearchResult
    written: dict[str, QuantizeResult]
    """Name of a part to what was written; a file has no name."""


def quantize_within(
    file: Source,
    output: str | Path,
    *,
    to: Sequence[str],
    data: Feeds | str | Path,
    processor: str | Path | None = None,
    check_runtime: bool = True,
    **options: Any,
) -> Searched:
    """Quantize a file, or a package of one graph, by the methods that :func:`.search` finds for its modules.

    Args:
        file: A tagged file, or a package.
        output: The file or the folder to write.
        to, data, processor: As for :func:`.search`. Ranges are measured on the inputs that it chooses by.
        check_runtime: Refuse methods for which the runtime of this machine has no kernel.
        options: Of :func:`.search`: ``within`` or ``budget``, and others.

    Raises:
        UsageError, FileFormatError, InputsError, OutputError: As for :func:`.search` and :func:`.quantize`.
    """
    path = as_path(file)
    graph = graph_of(path)
    feeds = given_feeds(read_tagged(graph), data, processor)
    found = search(graph, to=to, data=feeds, **options)
    if not found.met:
        return Searched(found, {})
    how: dict[str, Any] = {
        "recipe": found.recipe,
        "data": feeds[: found.runs[0]],
        "check_runtime": check_runtime,
    }
    if path.is_dir():
        return Searched(found, quantize_package(path, output, **how))
    return Searched(found, {"": quantize(path, output, **how)})


def graph_of(file: str | Path) -> Path:
    """The file itself, or that of the only graph of a package.

    Raises:
        UsageError: The package has several.
    """
    if not Path(file).is_dir():
        return Path(file)
    files = read_package(file).files
    if len(files) > 1:
        raise UsageError(f"data are inputs of one graph, and {file} has {len(files)}: give one of its files")
    return next(iter(files.values()))

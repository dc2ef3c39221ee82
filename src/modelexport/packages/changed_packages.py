"""Packages made from others: with new weights, from parts that another tool changed, or quantized."""

from __future__ import annotations

import filecmp
import hashlib
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import onnx_ir as ir

from modelexport.core.timed_stages import Stages
from modelexport.errors import UsageError
from modelexport.files import onnx_models
from modelexport.files.atomic_writing import check_written_by_us
from modelexport.files.external_data import sample_digest
from modelexport.files.folder_locks import STAGING_PREFIX
from modelexport.files.linked_weights import seal
from modelexport.files.manifest_file import write_manifest
from modelexport.files.output_folders import check_package_folder
from modelexport.files.path_or_model import Source, as_path
from modelexport.format import keys
from modelexport.format.documents import DataFile, WeightsFile
from modelexport.format.parameter_plan import ParameterPlan
from modelexport.graph.bound_tensors import bind_tensors
from modelexport.graph.nodes import initializers
from modelexport.graph.parameter_plans import parameter_plan, parameter_plans
from modelexport.graph.properties import record, recorded
from modelexport.lineage.retagging import RetagReport, retag, write_retagged
from modelexport.precision.calibration_data import RunInputs, given_runs
from modelexport.precision.quantize import QuantizeResult, check_quantized_writable, quantize, quantized, result_of
from modelexport.precision.recipes import Recipe, chosen_recipe, encode_recipe, of_parts
from modelexport.precision.search_within_bound import SearchResult, search
from modelexport.runtime.checked_writing import checked_and_written
from modelexport.surgery.adapted_file import AdaptedFile
from modelexport.surgery.lora_adapters import MergedAdapters
from modelexport.tagged.file import read_tagged
from modelexport.tagged.package import Package, read_package
from modelexport.weights.weight_updates import UpdateResult, WeightsInFile, new_tensor, planned

Report = TypeVar("Report", RetagReport, QuantizeResult)
NewTensors = Iterator[tuple[ir.Value, ParameterPlan, ir.TensorProtocol]]
"""Initializers, how they are computed from entries, and what takes their place."""


RECIPE, WEIGHTS = "recipe.yaml", "weights.data"


def update_package(folder: Path, state_dict: Path, output: Path) -> UpdateResult:
    """Write a package with new weights of the same shapes and the same graphs.

    Args:
        state_dict: A ``.safetensors`` file with every entry that a part uses.

    Raises:
        WeightsError: The weights do not fit. Lists every entry that does not fit.
        FileFormatError: The folder is not a package or is damaged, or the weights are not a safetensors file.
        OutputError: The output cannot be written. An existing folder of that name is unchanged.
        UsageError: A part has a weight embedded.
    """
    used: set[str] = set()
    weights = WeightsInFile(state_dict)

    def changed(file: Path) -> NewTensors:
        plans, tied, read = planned(file, onnx_models.load_onnx(file), weights)
        used.update(tied)
        return ((value, plan, new_tensor(file, value, plan, read)) for value, plan in plans.items())

    package = read_package(folder)
    with package_made_from(package, output, [state_dict]) as staging:
        replaced = _overwrite(package, staging, changed)
        files = sorted(str(output / file.relative_to(staging)) for file in staging.rglob("*") if file.is_file())
    unused = len(weights.types.keys() - used)
    return UpdateResult(
        path=str(output), files=files, replaced=replaced, transformed=0, kept=0, used=len(used), unused=unused
    )


def merge_adapters_into_package(folder: Path, adapters: Sequence[str | Path], output: Path) -> MergedAdapters:
    """Write a package with LoRA adapters added to the weights that its parts share, one after the other.

    Args:
        adapters: Folders that PEFT wrote.

    Raises:
        WeightsError: An adapter is for another model or of another kind.
        FileFormatError: A folder is not a package or an adapter, or is damaged.
        OutputError: The output cannot be written. An existing folder of that name is unchanged.
        UsageError: A part has a weight embedded, or a tied parameter would need a tensor of its own.
    """
    parts: list[AdaptedFile] = []

    def changed(file: Path) -> NewTensors:
        parts.append(work := AdaptedFile(file, adapters, output / file.name, None))
        for value in work.touched:
            for names in work.plans[value].groups():
                if 0 < len(set(names) & set(work.changes.keys)) < len(names):
                    raise UsageError(
                        f"the adapter changes one of the names of a tied parameter ({', '.join(names)}), and the "
                        f"weights of a package stay as they are laid out: apply it to {file} alone"
                    )
            yield value, work.plans[value], work.tensor(value)

    package = read_package(folder)
    with package_made_from(package, output, [*map(Path, adapters)]) as staging:
        replaced = _overwrite(package, staging, changed)
    merged = parts[-1].changes
    return MergedAdapters(
        path=str(output),
        adapters=[str(adapter.path) for adapter in merged.adapters],
        pairs=sum(map(len, merged.pairs.values())),
        whole=len(merged.whole),
        initializers=replaced,
        unused=[key for key in parts[0].unused if all(key in work.unused for work in parts)],
        untied=[],
        weights=list(package.manifest.weights),
    )


def retag_package(changed: Path, *, source: Path, output: Path) -> dict[str, RetagReport]:
    """Restore the tags of the parts of a package that another tool changed; the rest of the folder is copied.

    Args:
        changed: A folder in which the parts have the same names as in ``source``.
        source: The package that the tool read.

    Returns:
        Name of a part to its report.

    Raises:
        FileFormatError: ``source`` is not a package or is damaged, or a part is missing.
        UsageError: A part is not related to its source.
        OutputError: The output cannot be written. An existing folder of that name is unchanged.
    """
    package = read_package(source)
    with package_made_from(package, output, [changed]) as staging:
        return {
            part.name: moved(
                retag(changed / part.file, source=source / part.file, output=staging / part.file), staging, output
            )
            for part in package.manifest.parts
        }


@contextmanager
def package_made_from(
    package: Package, output: Path, reads: Sequence[Path] = (), *, check: bool = True
) -> Iterator[Path]:
    """A copy of the folder of a package, which takes the place of ``output`` when the block ends.

    Args:
        package: Its manifest is that of the copy.
        check: Whether the parts are loaded and run.
    """
    check_package_folder(output, [package.folder, *reads])
    # A recipe that is a copy of the package's own may be replaced, whoever wrote it.
    recipe, former = package.folder / RECIPE, output / RECIPE
    if not (recipe.is_file() and former.is_file() and filecmp.cmp(recipe, former, shallow=False)):
        check_written_by_us(former)
    read = [package.folder, *package.files.values(), *reads]
    with checked_and_written(output, read, make=True, package=True, check=check) as staging:
        _copy_folder(package.folder, staging)
        yield staging
        write_manifest(package.manifest, staging)


def moved(report: Report, staging: Path, output: Path) -> Report:
    """What is reported of files in a staging folder, with the places that they get."""
    path, *files = (str(output / Path(file).relative_to(staging)) for file in (report.path, *report.files))
    return msgspec.structs.replace(report, path=path, files=files)


def _copy_folder(folder: Path, target: Path) -> None:
    """Copy the regular files of a folder into another, symbolic links to them as files; what else is there is left.

    A file that is there under several names (weights of several parts) is one in the copy as well.
    """
    copied: dict[tuple[int, int], Path] = {}
    for file in sorted(folder.rglob("*")):
        place = target / file.relative_to(folder)
        if file.is_file() and not file.relative_to(folder).parts[0].startswith(STAGING_PREFIX):
            place.parent.mkdir(parents=True, exist_ok=True)
            status = file.stat()
            try:
                os.link(copied.setdefault((status.st_dev, status.st_ino), place), place)
            except OSError:  # it is the first of its names, or the file system has one name for a file
                shutil.copy2(file, place)


def _overwrite(package: Package, staging: Path, changed: Callable[[Path], NewTensors]) -> int:
    """Overwrite parameters in the weights files that the parts of a copied package share; returns how many.

    Raises:
        UsageError: A part has a weight embedded, or two parameters are at one place of a file.
    """
    written, names = set(), dict[object, list[str]]()
    for part, file in package.files.items():
        folder = staging / file.parent.relative_to(package.folder)
        for value, plan in parameter_plans(onnx_models.load_onnx(file)).items():
            if isinstance(tensor := value.const_value, ir.ExternalTensor) and tensor.nbytes:
                there = names.setdefault(((folder / tensor.location).stat().st_ino, tensor.offset), plan.keys)
                if set(there).isdisjoint(plan.keys):
                    raise UsageError(
                        f"{there[0]} and {plan.keys[0]} have one place in {tensor.location}, so neither can change "
                        "alone: make the package again"
                    )
        for value, plan, new in changed(file):
            tensor = value.const_value
            if not isinstance(tensor, ir.ExternalTensor) or plan.steps or tensor.offset is None:
                raise UsageError(f"{part} has {value.name} embedded: change the weights of {file} alone")
            target = folder / tensor.location
            place = (target.stat().st_ino, tensor.offset)
            if place not in written:
                written.add(place)
                with target.open("r+b") as opened:
                    opened.seek(tensor.offset)
                    opened.write(new.tobytes())
    for entry in package.manifest.parts:
        _record_samples(staging / entry.file)
    return len(written)


def _record_samples(path: Path) -> None:
    """Record the weights files that a model is linked to as they are now, after weights in them were overwritten."""
    model = onnx_models.load_onnx(path)
    linked: dict[str, WeightsFile] = recorded(model, keys.WEIGHTS) or {}
    now = {
        place: msgspec.structs.replace(file, sample=sample_digest(path.parent / place))
        for place, file in linked.items()
    }
    record(model, keys.WEIGHTS, now or None)
    onnx_models.save_with_references(model, path)


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
    parts = {name: read_tagged(file) for name, file in package.files.items()}
    feeds = None
    if data is not None:
        feeds = given_runs(read_tagged(graph_of(folder)), data, processor or folder)
    folders: dict[Path, list[str]] = defaultdict(list)
    for entry in package.manifest.parts:
        folders[Path(entry.file).parent].append(entry.name)
    weights = [(place / WEIGHTS).as_posix() for place in folders]
    made_from = replace(package, manifest=msgspec.structs.replace(package.manifest, weights=weights))
    results = {}
    with package_made_from(made_from, output, check=check_runtime) as staging:
        quantized_parts = {
            name: quantized(parts[name], rule, data=feeds, folder=staging)
            for name, rule in of_parts(rules, parts).items()
        }
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
) -> Searched:
    """Quantize a file, or a package of one graph, by the methods that :func:`search` finds for its modules.

    Args:
        file: A tagged file, or a package.
        output: The file or the folder to write.
        check_runtime: Load and run the result in the ONNX Runtime of this machine before it is written.
        to, data, processor, within, budget, metric, keep, only, output_name, stages, device: As for
            :func:`search`.
            Ranges are measured on the inputs that it chooses by.

    Raises:
        UsageError, FileFormatError, InputsError, OutputError: As for :func:`search` and :func:`quantize`.
    """
    path = as_path(file)
    graph = graph_of(path)
    if path.is_dir():
        check_written_by_us(Path(output) / RECIPE)
    else:
        check_quantized_writable(Path(output), path)
    feeds = given_runs(read_tagged(graph), data, processor)
    result = search(
        graph, to=to, data=feeds, within=within, budget=budget, metric=metric, keep=keep, only=only,
        output_name=output_name, stages=stages, device=device,
    )  # fmt: skip
    if not result.met:
        return Searched(result, {})
    how: dict[str, Any] = {"recipe": result.recipe, "data": feeds[: result.runs[0]], "check_runtime": check_runtime}
    written = quantize_package(path, output, **how) if path.is_dir() else {"": quantize(path, output, **how)}
    return Searched(result, written)


def graph_of(file: str | Path) -> Path:
    """The file itself, or that of the only graph of a package."""
    if not Path(file).is_dir():
        return Path(file)
    files = read_package(file).files
    if len(files) > 1:
        raise UsageError(f"data are inputs of one graph, and {file} has {len(files)}: give one of its files")
    return next(iter(files.values()))

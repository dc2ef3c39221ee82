"""A package with its modules quantized: every part by one recipe, the weights that parts share once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import onnx_ir as ir

from modelexport.errors import UsageError
from modelexport.files.atomic import written_together
from modelexport.files.linked_weights import record_data
from modelexport.files.manifests import write_manifest
from modelexport.files.onnx_models import (
    SMALLEST_OUTSIDE,
    inside_file,
    record_documents,
    save_with_references,
    write_data_file,
)
from modelexport.files.package_folders import check_package_folder
from modelexport.format import keys
from modelexport.graph.nodes import initializers
from modelexport.lineage.retagging import write_retagged
from modelexport.packages.changed_packages import copy_folder
from modelexport.precision.data import read_data
from modelexport.precision.quantize import Feeds, QuantizeResult, quantized, result_of
from modelexport.precision.recipes import Recipe, chosen_recipe, encode_recipe, of_parts
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
    check_package_folder(output, [folder])
    rules = chosen_recipe(to, keep, only, recipe)
    parts = {name: read_tagged(file) for name, file in package.files.items()}
    if data is not None and len(parts) > 1:
        raise UsageError(f"data are inputs of one file, and {folder} has {len(parts)}: quantize one of its parts alone")
    if isinstance(data, str | Path):
        data = read_data(Path(data), next(iter(parts.values())).model, Path(processor or folder))
    with written_together(output, [folder], make=True, package=True) as staging:
        made = {
            name: quantized(parts[name], rule, data=data, folder=staging, check=check_runtime)
            for name, rule in of_parts(rules, parts).items()
        }
        copy_folder(folder, staging)
        for name in package.manifest.weights:
            (staging / name).unlink(missing_ok=True)
        shared: dict[Path, _Shared] = {}
        for entry in package.manifest.parts:
            place = (staging / entry.file).parent
            shared.setdefault(place, _Shared(place / WEIGHTS)).add(made[entry.name].model)
        for weights in shared.values():
            weights.write()
        results = {}
        for entry in package.manifest.parts:
            file, one, tagged = staging / entry.file, made[entry.name], parts[entry.name]
            report = write_retagged(one.model, tagged, file, save=shared[file.parent].save)
            files = [str(output / Path(written).relative_to(staging)) for written in report.files]
            result = result_of(report, one)
            results[entry.name] = msgspec.structs.replace(result, path=str(output / entry.file), files=files)
        (staging / RECIPE).write_bytes(encode_recipe(rules))
        names = [weights.path.relative_to(staging).as_posix() for weights in shared.values()]
        write_manifest(msgspec.structs.replace(package.manifest, weights=names), staging)
    return results


@dataclass
class _Shared:
    """The weights of all parts in a folder: each tensor once, by its content."""

    path: Path
    tensors: dict[object, ir.TensorProtocol] = field(default_factory=dict)
    keys: dict[ir.Value, object] = field(default_factory=dict)
    placed: Mapping[object, ir.ExternalTensor] = field(default_factory=dict)
    record: str = ""

    def add(self, model: ir.Model) -> None:
        for value in initializers(model):
            tensor = value.const_value
            if tensor is not None and tensor.nbytes >= SMALLEST_OUTSIDE and tensor.dtype != ir.DataType.STRING:
                digest = hashlib.sha256(tensor.tobytes()).digest()
                self.keys[value] = key = (digest, tensor.dtype, tuple(tensor.shape.numpy()))
                self.tensors.setdefault(key, tensor)

    def write(self) -> None:
        by_value = {ir.Value(name=f"{number}"): tensor for number, tensor in enumerate(self.tensors.values())}
        places = write_data_file(by_value, self.path.parent, self.path.name)
        self.placed = dict(zip(self.tensors, places.values(), strict=True))
        nothing = ir.Model(ir.Graph([], [], nodes=[]), ir_version=10)
        record_data(nothing, self.path)  # seals the file, which is done once
        self.record = nothing.metadata_props[keys.DATA]

    def save(self, model: ir.Model, path: Path, documents: Mapping[str, bytes]) -> None:
        """Write a part that points into the file of weights."""
        record_documents(model, documents)
        model.metadata_props.pop(keys.WEIGHTS, None)
        model.metadata_props[keys.DATA] = self.record
        outside = {value: self.placed[self.keys[value]] for value in initializers(model) if value in self.keys}
        inside = {
            value: inside_file(value.const_value, at_once=True)
            for value in initializers(model)
            if value not in outside and value.const_value is not None
        }
        save_with_references(model, path, {**inside, **outside})

"""Packages made from others: with new weights, or from parts that another tool changed."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import onnx_ir as ir

from modelexport.errors import UsageError
from modelexport.files import onnx_models
from modelexport.files.external_data import sample_digest
from modelexport.files.folder_locks import STAGING_PREFIX
from modelexport.files.manifest_file import write_manifest
from modelexport.files.output_folders import check_package_folder
from modelexport.files.replaceable_files import check_written_by_us
from modelexport.format import keys
from modelexport.format.documents import WeightsFile
from modelexport.format.parameter_plan import ParameterPlan
from modelexport.graph.parameter_plans import parameter_plans
from modelexport.graph.properties import record, recorded
from modelexport.lineage.retagging import RetagReport, retag
from modelexport.runtime.checked_writing import checked_and_written
from modelexport.tagged.package import Package, files_of, read_package
from modelexport.weights.weight_updates import UpdateResult, WeightsInFile, new_tensor, planned

Report = TypeVar("Report", bound=msgspec.Struct)
"""A report of files that were written, with ``path`` and ``files``."""
NewTensors = Iterator[tuple[ir.Value, ParameterPlan, ir.TensorProtocol]]
"""Initializers, how they are computed from entries, and what takes their place."""


RECIPE, WEIGHTS = "recipe.yaml", "weights.data"


def update_package(folder: Path, state_dict: Path, output: Path, *, strict: bool = False) -> UpdateResult:
    """Write a package with new weights of the same shapes and the same graphs.

    Args:
        state_dict: A ``.safetensors`` file with every entry that a part uses.
        strict: Refuse entries that the module does not have.

    Raises:
        WeightsError: The weights do not fit. Lists every entry that does not fit.
        FileFormatError: The folder is not a package or is damaged, or the weights are not a safetensors file.
        OutputError: The output cannot be written. An existing folder of that name is unchanged.
        UsageError: A part has a weight embedded.
    """
    used: set[str] = set()
    weights = WeightsInFile(state_dict)

    def changed(file: Path) -> NewTensors:
        plans, tied, read = planned(file, onnx_models.load_onnx(file), weights, strict)
        used.update(tied)
        return ((value, plan, new_tensor(file, value, plan, read)) for value, plan in plans.items())

    package = read_package(folder)
    with package_made_from(package, output, [state_dict]) as staging:
        replaced = overwrite_parameters(package, staging, changed)
        files = sorted(str(output / file.relative_to(staging)) for file in staging.rglob("*") if file.is_file())
    unused = len(weights.types.keys() - used)
    return UpdateResult(
        path=str(output), files=files, replaced=replaced, transformed=0, kept=0, used=len(used), unused=unused
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
    written: Any = report
    path, *files = (str(output / Path(file).relative_to(staging)) for file in (written.path, *written.files))
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


def overwrite_parameters(package: Package, staging: Path, changed: Callable[[Path], NewTensors]) -> int:
    """Overwrite parameters in the weights files that the parts of a copied package share; returns how many."""
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


def only_graph(file: str | Path) -> Path:
    """The file itself, or that of the only graph of a package."""
    files = files_of(file)
    if len(files) > 1:
        raise UsageError(f"data are inputs of one graph, and {file} has {len(files)}: give one of its files")
    return next(iter(files.values()))

"""Packages made from others: with new weights, or from parts that another tool changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import onnx_ir as ir

from modelexport.errors import UsageError
from modelexport.files.abandoned_staging import STAGING_PREFIX
from modelexport.files.atomic import written_together
from modelexport.files.linked_weights import record_samples
from modelexport.files.manifests import write_manifest
from modelexport.files.onnx_models import load_onnx
from modelexport.files.package_folders import check_package_folder
from modelexport.lineage.retagging import RetagReport, retag
from modelexport.precision.quantize import QuantizeResult
from modelexport.surgery.adapted_file import AdaptedFile
from modelexport.surgery.adapting import MergedAdapters
from modelexport.tagged.package import Package, read_package
from modelexport.weights.transforms import ParameterPlan
from modelexport.weights.updates import UpdateResult, WeightsInFile, new_tensor, planned

Report = TypeVar("Report", RetagReport, QuantizeResult)
Changed = Iterator[tuple[ir.Value, ParameterPlan, ir.TensorProtocol]]
"""Initializers, how they are computed from entries, and what takes their place."""


def update_package(folder: Path, state_dict: Path, output: Path) -> UpdateResult:
    """Write a package with new weights of the same shapes and the same graphs.

    Args:
        folder: The package.
        state_dict: A ``.safetensors`` file with every entry that a part uses.
        output: The folder to write; not ``folder``.

    Raises:
        WeightsError: The weights do not fit. Lists every entry that does not fit.
        FileFormatError: The folder is not a package or is damaged, or the weights are not a safetensors file.
        OutputError: The output cannot be written. An existing folder of that name is unchanged.
        UsageError: A part has a weight embedded.
    """
    used: set[str] = set()
    weights = WeightsInFile(state_dict)

    def changed(file: Path) -> Changed:
        plans, tied, read = planned(file, load_onnx(file), weights)
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
        folder: The package.
        adapters: Folders that PEFT wrote.
        output: The folder to write; not ``folder``.

    Raises:
        WeightsError: An adapter is for another model or of another kind.
        FileFormatError: A folder is not a package or an adapter, or is damaged.
        OutputError: The output cannot be written. An existing folder of that name is unchanged.
        UsageError: A part has a weight embedded, or a tied parameter would need a tensor of its own.
    """
    parts: list[AdaptedFile] = []

    def changed(file: Path) -> Changed:
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
        output: The folder to write.

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
def package_made_from(package: Package, output: Path, reads: Sequence[Path] = ()) -> Iterator[Path]:
    """A copy of the folder of a package, which takes the place of ``output`` when the block ends.

    Args:
        package: Its manifest is that of the copy.
        reads: What is read besides.

    Raises:
        OutputError: The output cannot be written. An existing folder of that name is unchanged.
    """
    check_package_folder(output, [package.folder, *reads])
    with written_together(output, [package.folder, *reads], make=True, package=True) as staging:
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


def _overwrite(package: Package, staging: Path, changed: Callable[[Path], Changed]) -> int:
    """Overwrite parameters in the weights files that the parts of a copied package share; returns how many.

    Raises:
        UsageError: A part has a weight embedded.
    """
    written = set()
    for part, file in package.files.items():
        for value, plan, new in changed(file):
            tensor = value.const_value
            if not isinstance(tensor, ir.ExternalTensor) or plan.steps or tensor.offset is None:
                raise UsageError(f"{part} has {value.name} embedded: change the weights of {file} alone")
            target = staging / file.parent.relative_to(package.folder) / str(tensor.location)
            place = (target.stat().st_ino, tensor.offset)
            if place not in written:
                written.add(place)
                with target.open("r+b") as opened:
                    opened.seek(tensor.offset)
                    opened.write(new.tobytes())
    for entry in package.manifest.parts:
        record_samples(staging / entry.file)
    return len(written)

"""Packages made from others: with new weights, or from parts that another tool changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx_ir as ir

from modelexport.errors import UsageError
from modelexport.files.abandoned_staging import STAGING_PREFIX
from modelexport.files.atomic import written_together
from modelexport.files.linked_weights import record_samples
from modelexport.files.manifests import write_manifest
from modelexport.files.onnx_models import load_onnx
from modelexport.files.package_folders import check_package_folder
from modelexport.lineage.retagging import RetagReport, retag
from modelexport.surgery.adapted_file import AdaptedFile
from modelexport.surgery.adapting import MergedAdapters
from modelexport.tagged.package import read_package
from modelexport.weights.updates import UpdateResult, WeightsInFile, planned


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
    package = read_package(folder)
    check_package_folder(output, [folder, state_dict])
    used: dict[str, tuple[str, ...]] = {}
    written: dict[tuple[int, int], str] = {}
    weights = WeightsInFile(state_dict)
    with written_together(output, [folder, state_dict], make=True, package=True) as staging:
        copy_folder(folder, staging)
        for part, file in package.files.items():
            model = load_onnx(file)
            plans, tied, read = planned(file, model, weights)
            used |= tied
            for value, plan in plans.items():
                tensor = value.const_value
                if not isinstance(tensor, ir.ExternalTensor) or plan.steps or tensor.offset is None:
                    raise UsageError(f"{part} has {value.name} embedded: update {file} alone, or export again")
                target = staging / file.parent.relative_to(folder) / str(tensor.location)
                place = (target.stat().st_ino, tensor.offset)
                if place not in written:
                    _overwrite(target, tensor, plan.compute({key: read(key) for key in plan.inputs()}))
                    written[place] = plan.keys[0]
        for entry in package.manifest.parts:
            record_samples(staging / entry.file)
        write_manifest(package.manifest, staging)
        unused = len(weights.types.keys() - used.keys())
        files = sorted(str(output / file.relative_to(staging)) for file in staging.rglob("*") if file.is_file())
    return UpdateResult(
        path=str(output), files=files, replaced=len(written), transformed=0, kept=0, used=len(used), unused=unused
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
    package = read_package(folder)
    check_package_folder(output, [folder, *map(Path, adapters)])
    written: set[tuple[str, int]] = set()
    unused: dict[str, int] = {}
    with written_together(output, [folder], make=True, package=True) as staging:
        copy_folder(folder, staging)
        for part, file in package.files.items():
            work = AdaptedFile(file, adapters, output / file.name, None)
            for value in work.touched:
                tensor, plan = value.const_value, work.plans[value]
                one_of = [names for names in plan.groups() if 0 < len(set(names) & set(work.changes.keys)) < len(names)]
                if one_of:
                    raise UsageError(
                        f"the adapter changes one of the names of a tied parameter ({', '.join(one_of[0])}), and the "
                        f"weights of a package stay as they are laid out: apply it to {file} alone"
                    )
                if not isinstance(tensor, ir.ExternalTensor) or plan.steps or tensor.offset is None:
                    raise UsageError(f"{part} has {value.name} embedded: apply the adapter to {file} alone")
                target = file.parent.relative_to(folder) / str(tensor.location)
                if (str(target), tensor.offset) not in written:
                    written.add((str(target), tensor.offset))
                    _overwrite(staging / target, tensor, work.tensor(value).numpy())
            for key in work.unused:
                unused[key] = unused.get(key, 0) + 1
            merged = work.changes
        for entry in package.manifest.parts:
            record_samples(staging / entry.file)
        write_manifest(package.manifest, staging)
    return MergedAdapters(
        path=str(output),
        adapters=[str(adapter.path) for adapter in merged.adapters],
        pairs=sum(map(len, merged.pairs.values())),
        whole=len(merged.whole),
        initializers=len(written),
        unused=[key for key, count in unused.items() if count == len(package.files)],
        untied=[],
        weights=list(package.manifest.weights),
    )


def copy_folder(folder: Path, target: Path) -> None:
    """Copy the regular files of a folder into another, symbolic links to them as files; what else is there is left.

    A file that is there under several names (weights of several parts) is one in the copy as well.
    """
    copied: dict[tuple[int, int], Path] = {}
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        if file.is_file() and not inside.parts[0].startswith(STAGING_PREFIX):
            (target / inside).parent.mkdir(parents=True, exist_ok=True)
            status = file.stat()
            first = copied.setdefault((status.st_dev, status.st_ino), target / inside)
            if first != target / inside and _linked(first, target / inside):
                continue
            shutil.copy2(file, target / inside)


def _linked(first: Path, second: Path) -> bool:
    """Give a file a second name; returns whether the file system can."""
    try:
        os.link(first, second)
    except OSError:
        return False
    return True


def _overwrite(file: Path, tensor: ir.ExternalTensor, array: np.ndarray) -> None:
    data = ir.tensor(array).tobytes()
    with file.open("r+b") as opened:
        opened.seek(tensor.offset or 0)
        opened.write(data)


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
    check_package_folder(output, [source, changed])
    reports = {}
    with written_together(output, [source, changed], make=True, package=True) as staging:
        copy_folder(source, staging)
        for part in package.manifest.parts:
            report = retag(changed / part.file, source=source / part.file, output=staging / part.file)
            files = [str(output / Path(file).relative_to(staging)) for file in report.files]
            reports[part.name] = msgspec.structs.replace(report, path=str(output / part.file), files=files)
        write_manifest(package.manifest, staging)
    return reports

"""LoRA adapters merged into the weights that the parts of a package share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from modelexport.errors import UsageError
from modelexport.packages.changed_packages import NewTensors, overwrite_parameters, package_made_from
from modelexport.tagged.package import read_package
from modelexport.tools.adapters.adapted_file import AdaptedFile
from modelexport.tools.adapters.lora_adapters import MergedAdapters


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
        replaced = overwrite_parameters(package, staging, changed)
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

"""Reading packages: folders of tagged files that share one set of weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from modelexport.core.text import suggest
from modelexport.errors import FileFormatError, UsageError
from modelexport.files.manifest_file import read_manifest
from modelexport.files.onnx_models import load_onnx
from modelexport.format.package_manifest import MANIFEST, Manifest, PartEntry
from modelexport.graph.node_owners import owner_of
from modelexport.graph.parameter_plans import listed_entries
from modelexport.tagged.file import read_tagged


@dataclass(frozen=True)
class Package:
    """The manifest of a folder that has all of its files."""

    folder: Path
    manifest: Manifest

    @property
    def files(self) -> dict[str, Path]:
        """Name of a part to its file, in the order in which they run."""
        return {part.name: self.folder / part.file for part in self.manifest.parts}

    def part(self, name: str) -> PartEntry:
        """The part with a name."""
        for part in self.manifest.parts:
            if part.name == name:
                return part
        names = list(self.files)
        raise UsageError(f"{self.folder} has no part {name}{suggest(name, names)}; it has {', '.join(names)}")


def read_package(folder: str | Path) -> Package:
    """Read the manifest of a package, and check that its files exist and belong together.

    Raises:
        FileFormatError: The manifest is missing or of an unknown version, or a file is missing or of another export.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    package = Package(folder, manifest)
    _check_together(package)
    return package


def _check_together(package: Package) -> None:
    """Refuse parts that were not written by one export: their inputs, entries or weights differ."""
    first = ""
    entries: dict[str, tuple[str, list[int]]] | None = None
    for part in package.manifest.parts:
        model = load_onnx(package.folder / part.file)
        names = [[value.name or "" for value in values] for values in (model.graph.inputs, model.graph.outputs)]
        if names != [part.inputs, part.outputs]:
            raise FileFormatError(
                f"{package.folder / part.file} belongs to another export: its inputs and outputs are not those that "
                f"{MANIFEST} lists; put the file back, or export the package again"
            )
        listed = listed_entries(model) or {}
        described = {
            key: (entry.dtype, entry.shape) for key, entry in listed.items()
        }  # not which of them this part uses
        if entries is not None and described != entries:
            raise FileFormatError(
                f"{part.file} and {first} in {package.folder} belong to different models: export the package again"
            )
        first, entries = first or part.file, described


def files_of(path: str | Path) -> dict[str, Path]:
    """The file itself under an empty name, or the parts of a package by name."""
    return read_package(path).files if Path(path).is_dir() else {"": Path(path)}


def parts_with(path: Path, *modules: str) -> dict[str, Path]:
    """The files in which modules own nodes: the file itself, or parts of a package by name, in their order.

    Raises:
        FileFormatError: The path is a folder that is not a package, or a damaged one.
        UsageError: No part has the modules.
    """
    if not path.is_dir():
        return {"": path}
    exact: dict[str, Path] = {}
    called: dict[str, Path] = {}
    failure: UsageError | None = None
    for name, file in read_package(path).files.items():
        tagged = read_tagged(file)
        try:
            calls = tagged.select(*modules).inside
        except UsageError as error:
            failure = error
            continue
        called[name] = file
        if any(call in calls for node in tagged.nodes if (owner := owner_of(node)) for call in owner.calls):
            exact[name] = file
    if not called and failure is not None:
        raise failure
    return exact or called

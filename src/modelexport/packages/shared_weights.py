"""The weights of a package, written or linked once: those of a model for all parts, or those of each component."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from modelexport.errors import OutputError
from modelexport.files.linked_weights import clone_or_link
from modelexport.files.safetensors_files import SINGLE, Place, SafetensorsFile, read_header
from modelexport.packages.model_parts import ModelPart
from modelexport.pytorch.checkpoints import find_entries, save_entries
from modelexport.weights import WeightsMode
from modelexport.weights.sources import Weights
from modelexport.weights.storage import link_file

if TYPE_CHECKING:
    from torch import nn


def share_weights(model: nn.Module, source: Weights | None, folder: Path, mode: WeightsMode) -> Weights:
    """Write or link the weights of a model into a folder, once.

    Args:
        source: The places of the entries in the checkpoint. Its files are linked if they contain every entry unchanged.
        folder: The folder of the package.
        mode: ``link``, ``copy``, or ``auto``: linked if possible.

    Returns:
        The place of each entry in the folder.

    Raises:
        OutputError: The checkpoint cannot be linked, and ``mode`` is ``link``.
    """
    if source is not None and not source.made:
        return _with_checkpoint(source, folder, mode)
    if mode == "link":
        made = len(source.made) if source is not None else 0
        raise OutputError(
            f"{made} entries are not in the checkpoint unchanged, so it cannot be linked: use --weights copy"
            if made
            else "the model has no safetensors files that could be linked: use --weights copy"
        )
    return _written(model, source, folder / SINGLE)


def put_file(file: SafetensorsFile, target: Path, mode: WeightsMode) -> None:
    """Link a file of weights to another place; copy it if the mode says so, or if it cannot be linked and need not be.

    Raises:
        OutputError: It cannot be linked, and the mode is ``link``.
    """
    if mode == "copy":
        shutil.copyfile(file.path, target)
        return
    try:
        link_file(file, target)
    except OutputError:
        if mode == "link":
            raise
        shutil.copyfile(file.path, target)


def _with_checkpoint(source: Weights, folder: Path, mode: WeightsMode) -> Weights:
    files: dict[str, Path] = {}
    for file in source.files:
        target = folder / file.path.name
        if target.exists():
            raise OutputError(f"two files of the checkpoint have the name {target.name}: rename one of them")
        put_file(file, target, mode)
        files[str(file.path.resolve())] = target
    tensors: dict[str, ir.TensorProtocol] = {}
    for key, one in source.tensors.items():
        if isinstance(one, ir.ExternalTensor):
            path = files[str(one.path)].resolve()
            tensors[key] = Place(path, one.offset or 0, one.length or 0, one.dtype, one.shape.numpy()).tensor(key)
    moved = tuple(SafetensorsFile(files[str(f.path.resolve())], f.size, f.header, f.tensors) for f in source.files)
    return Weights(tensors, {}, moved)


def _written(model: nn.Module, source: Weights | None, path: Path) -> Weights:
    """Write every entry to one file, tied ones once."""
    keys = save_entries(model, source, path)
    file = read_header(path)
    tensors = {key: file.tensors[name].tensor(key) for key, name in keys.items()}
    return Weights(tensors, {}, (file,), in_memory=source is None)


def share_components(
    parts: Sequence[ModelPart], directory: Path | None, folder: Path, mode: WeightsMode
) -> dict[str, Weights]:
    """Write or link the weights of each component into the folders of its parts, once.

    Args:
        directory: The folder of the pipeline. A component's files are linked if they contain every entry unchanged.
        folder: The folder of the package.
        mode: ``link``, ``copy``, or ``auto``: linked if possible.

    Returns:
        Name of a part to the places of its component's entries.

    Raises:
        OutputError: A component cannot be linked, and ``mode`` is ``link``.
    """
    shared: dict[str, Weights] = {}
    first: dict[str, tuple[Path, dict[str, Place]]] = {}
    for part in parts:
        place = (folder / part.path).parent
        place.mkdir(parents=True, exist_ok=True)
        if part.module in first:
            there, places = first[part.module]
            _link_again(there, place, places)
        else:
            component = part.model.get_submodule(part.module)
            own = None if directory is None else directory / part.module
            first[part.module] = place, _placed(component, part.module, own, place, mode)
            there, places = first[part.module]
        shared[part.name] = _moved(places, place, part.module)
    return shared


def _placed(
    component: nn.Module, name: str, directory: Path | None, folder: Path, mode: WeightsMode
) -> dict[str, Place]:
    """Put the files of a component into a folder; each of its keys to its place there."""
    files = list(_files(directory))
    places = find_entries(component, files)
    if places is None:
        if mode == "link":
            raise OutputError(
                f"{name} is not in safetensors files unchanged, so it cannot be linked: use --weights copy"
            )
        names = save_entries(component, None, folder / SINGLE)
        written = read_header(folder / SINGLE)
        return {key: written.tensors[entry] for key, entry in names.items()}
    used = {place.path for place in places.values()}
    for file in files:
        if Path(os.path.realpath(file.path)) in used:
            put_file(file, folder / file.path.name, mode)
    by_path = {Path(os.path.realpath(file.path)): folder / file.path.name for file in files}
    return {key: _at(place, by_path[place.path]) for key, place in places.items()}


def _link_again(there: Path, place: Path, places: Mapping[str, Place]) -> None:
    """Link the weights of a component into the folder of another part; copy them if the file system cannot link."""
    for source in {one.path for one in places.values()}:
        try:
            clone_or_link(source, place / source.name)
        except OSError:
            shutil.copyfile(source, place / source.name)


def _files(directory: Path | None) -> Iterator[SafetensorsFile]:
    for path in sorted(directory.glob("*.safetensors")) if directory is not None else ():
        yield read_header(path)


def _at(place: Place, path: Path) -> Place:
    return Place(path.resolve(), place.offset, place.length, place.dtype, place.shape)


def _moved(places: Mapping[str, Place], folder: Path, component: str) -> Weights:
    """The entries of a component, with their names in the pipeline, in the files of a folder."""
    files = {place.path.name: read_header(folder / place.path.name) for place in places.values()}
    names = {f"{component}.{key}": _at(place, folder / place.path.name) for key, place in places.items()}
    tensors = {name: place.tensor(name) for name, place in names.items()}
    return Weights(tensors, {}, tuple(files.values()), in_memory=True)

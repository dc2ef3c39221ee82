"""The weights of a package, written or linked once for all parts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from modelexport.errors import OutputError
from modelexport.files.safetensors_files import SINGLE, TensorLocation, read_header
from modelexport.pytorch.checkpoints.checkpoint_entries import save_entries
from modelexport.weights import WeightsMode
from modelexport.weights.bytes_of_entries import Weights
from modelexport.weights.linked_copied_embedded import link_file

if TYPE_CHECKING:
    from torch import nn


def share_weights(
    model: nn.Module, source: Weights | None, folder: Path, mode: WeightsMode, component: str = ""
) -> Weights:
    """Write or link the weights of a model into a folder, once.

    Args:
        source: The places of the entries in the checkpoint. Its files are linked if they contain every entry unchanged.
        mode: ``link``, ``copy``, or ``auto``: linked if possible.
        component: The name of the model in its pipeline, which begins the names of its entries.

    Returns:
        The place of each entry in the folder.
    """
    if source is not None and not source.made:
        return moved_weights(source, folder, mode)
    if mode == "link":
        changed = len(source.made) if source is not None else 0
        raise OutputError(
            f"{changed} entries are not in the checkpoint unchanged, so it cannot be linked: use --weights copy"
            if changed
            else f"{component or 'the model'} has no safetensors files that could be linked: use --weights copy"
        )
    names = save_entries(model, source, folder / SINGLE)  # tied entries once
    file = read_header(folder / SINGLE)
    places = {key: file.tensors[name] for key, name in names.items()}
    return Weights(tensors_at(places, f"{component}." * bool(component)), {}, (file,), in_memory=source is None)


def moved_weights(weights: Weights, folder: Path, mode: WeightsMode) -> Weights:
    """Link the files of weights into a folder, or copy them: as the mode says, and with ``auto`` as is possible."""
    targets: dict[Path, Path] = {}
    for file in weights.files:
        target = folder / file.path.name
        if target.exists():
            raise OutputError(f"two files of the checkpoint have the name {target.name}: rename one of them")
        try:
            if mode != "copy":
                link_file(file, target)
        except OutputError:
            if mode == "link":
                raise
        if not target.exists():
            shutil.copyfile(file.path, target)
        targets[Path(os.path.realpath(file.path))] = target
    places = {
        key: TensorLocation(
            targets[Path(tensor.path)].resolve(),
            tensor.offset or 0,
            tensor.length or 0,
            tensor.dtype,
            tensor.shape.numpy(),
        )
        for key, tensor in weights.tensors.items()
        if isinstance(tensor, ir.ExternalTensor)
    }
    files = tuple(replace(file, path=targets[Path(os.path.realpath(file.path))]) for file in weights.files)
    return replace(weights, tensors=tensors_at(places), files=files)


def tensors_at(places: Mapping[str, TensorLocation], prefix: str = "") -> dict[str, ir.TensorProtocol]:
    """Name of an entry, with a prefix, to the tensor at its place."""
    return {f"{prefix}{key}": place.tensor(f"{prefix}{key}") for key, place in places.items()}

"""One set of weights for all parts of a package: the checkpoint's own files, or one file with all entries."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from modelexport.errors import OutputError
from modelexport.files.safetensors_files import SINGLE, Place, SafetensorsFile, read_header
from modelexport.weights import WeightsMode
from modelexport.weights.placement import link_file
from modelexport.weights.sources import Weights

if TYPE_CHECKING:
    from torch import nn


def share_weights(
    model: nn.Module, source: Weights | None, folder: Path, mode: WeightsMode, *, name: str = SINGLE
) -> Weights:
    """Write or link the weights of a model into a folder, once.

    Args:
        source: The places of the entries in the checkpoint. Its files are linked if they contain every entry unchanged.
        folder: The folder of the package.
        mode: ``link``, ``copy``, or ``auto``: linked if possible.
        name: The name of the file to write if they are not linked.

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
    return _written(model, source, folder / name)


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
    tensors = {
        key: ir.ExternalTensor(
            str(files[str(tensor.path)].resolve()),
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=key,
        )
        for key, tensor in source.tensors.items()
        if isinstance(tensor, ir.ExternalTensor)
    }
    moved = tuple(SafetensorsFile(files[str(f.path.resolve())], f.size, f.header, f.tensors) for f in source.files)
    return Weights(tensors, {}, moved)


def _written(model: nn.Module, source: Weights | None, path: Path) -> Weights:
    """Write every entry to one file, tied ones once."""
    from modelexport.pytorch.checkpoints import save_entries

    keys = save_entries(model, source, path)
    file = read_header(path)
    tensors: Mapping[str, ir.TensorProtocol] = {key: tensor_at(key, file.tensors[name]) for key, name in keys.items()}
    return Weights(tensors, {}, (file,), in_memory=source is None)


def tensor_at(key: str, place: Place) -> ir.TensorProtocol:
    """The tensor of an entry whose bytes are in a file."""
    return ir.ExternalTensor(
        str(place.path), place.offset, place.length, place.dtype, shape=ir.Shape(place.shape), name=key
    )

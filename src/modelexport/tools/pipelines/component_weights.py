"""The weights of the models of a pipeline, written or linked once each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from modelexport.files.safetensors_files import read_header
from modelexport.packages.model_parts import ModelPart
from modelexport.packages.shared_weights import moved_weights, share_weights, tensors_at
from modelexport.pytorch.checkpoints.checkpoint_entries import find_entries
from modelexport.weights import WeightsMode
from modelexport.weights.bytes_of_entries import Weights


def share_components(
    parts: Sequence[ModelPart], directory: Path | None, folder: Path, mode: WeightsMode
) -> dict[str, Weights]:
    """Write or link the weights of each component into the folders of its parts, once.

    Args:
        directory: The folder of the pipeline. A component's files are linked if they contain every entry unchanged.
        mode: As for :func:`share_weights`.

    Returns:
        Name of a part to the places of its component's entries.
    """
    shared: dict[str, Weights] = {}
    first: dict[str, Weights] = {}
    for part in parts:
        place, name = (folder / part.path).parent, part.module
        place.mkdir(parents=True, exist_ok=True)
        if name in first:
            shared[part.name] = moved_weights(first[name], place, "auto")
            continue
        component = part.model.get_submodule(name)
        paths = sorted((directory / name).glob("*.safetensors")) if directory is not None else ()
        files = [read_header(path) for path in paths]
        places = find_entries(component, files)
        source = None
        if places is not None:
            used = {entry.path for entry in places.values()}
            linked = tuple(file for file in files if Path(os.path.realpath(file.path)) in used)
            source = Weights(tensors_at(places, f"{name}."), {}, linked, in_memory=True)
        shared[part.name] = first[name] = share_weights(component, source, place, mode, name)
    return shared

"""A package of stages, run one stage after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from modelexport.errors import FileFormatError, InputsError
from modelexport.format.packages import Manifest
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tagged.package import read_manifest


def read_stages(folder: str | Path) -> Manifest:
    """The manifest of a package of stages.

    Raises:
        FileFormatError: There is none, it is damaged or of another kind or version, or a part is missing.
    """
    manifest = read_manifest(Path(folder))
    if manifest.kind != "stages":
        raise FileFormatError(f"{folder} is a package of the kind '{manifest.kind}', not of stages")
    return manifest


def run_chain(
    folder: str | Path, feeds: Mapping[str, Any], *, opened: Callable[[Path], Any] = open_session
) -> dict[str, Any]:
    """Run the stages of a package; one of them is loaded at a time, and values are dropped after their last use.

    Args:
        feeds: Arrays for the inputs of the whole model, by name.
        opened: Makes a session of a stage's file.

    Returns:
        What no later stage takes: the outputs of the whole model, by name. One that is an output and is taken as well
        is among them too.

    Raises:
        FileFormatError: The folder is not a package of stages.
        InputsError: An input is missing.
        UsageError: ONNX Runtime does not run a stage.
    """
    manifest = read_stages(folder)
    values: dict[str, Any] = dict(feeds)
    outputs: dict[str, Any] = {}
    for part in manifest.parts:
        if missing := [name for name in part.inputs if name not in values]:
            raise InputsError(f"{part.file} of {folder} needs {', '.join(missing)}: give all inputs of the model")
        made = run_session(opened(Path(folder, part.file)), {name: values[name] for name in part.inputs})
        values |= made
        outputs |= made
    return outputs

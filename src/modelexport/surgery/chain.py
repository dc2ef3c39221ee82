"""Running a package of stages, one stage after the other."""

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
        FileFormatError: It is missing, damaged, or of another kind or version, or a part is missing.
    """
    manifest = read_manifest(Path(folder))
    if manifest.kind != "stages":
        raise FileFormatError(f"{folder} is a package of the kind '{manifest.kind}', not of stages")
    return manifest


def run_chain(
    folder: str | Path, feeds: Mapping[str, Any], *, opened: Callable[[Path], Any] = open_session
) -> dict[str, Any]:
    """Run the stages of a package, one loaded at a time; values are dropped after their last use.

    Args:
        feeds: Arrays for the inputs of the whole model, by name.
        opened: Opens a session for a stage's file.

    Returns:
        The outputs of the whole model, by name: the outputs of stages that no later stage takes, and those that a stage
        takes but that are outputs of the model as well.

    Raises:
        FileFormatError: The folder is not a package of stages.
        InputsError: An input is missing.
        UsageError: ONNX Runtime cannot run a stage.
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

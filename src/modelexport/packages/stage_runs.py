"""Running a package of stages, one stage after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from modelexport.core.result_display import Report, Rows
from modelexport.core.text import first_few
from modelexport.errors import FileFormatError, InputsError, UsageError
from modelexport.files.manifest_file import read_manifest
from modelexport.files.path_or_model import Source
from modelexport.format.package_manifest import Manifest
from modelexport.runtime.devices import CPU
from modelexport.runtime.random_inputs import make_random_inputs
from modelexport.runtime.sessions import array_of_input, arrays_in, open_session, run_session
from modelexport.tagged.file import read_tagged
from modelexport.traces.array_differences import Difference, Verdict, compare_arrays, verdict_of
from modelexport.traces.outputs_of_two_files import without_random


class StagesReport(Report, msgspec.Struct, frozen=True):
    """The outputs of stages that run one after the other, compared with those of the whole file."""

    outputs: list[Difference]

    @property
    def verdict(self) -> Verdict:
        """``agree`` if an output agrees and none differs."""
        return verdict_of([output.status for output in self.outputs])

    @property
    def document(self) -> list[Difference]:
        return self.outputs

    def _table(self) -> Rows:
        yield "output", "status", "largest difference"
        yield from ((output.name, output.status, output.absolute) for output in self.outputs)


def read_stages(folder: str | Path) -> Manifest:
    """The manifest of a package of stages."""
    manifest = read_manifest(Path(folder))
    if manifest.kind != "stages":
        parts = first_few(part.file for part in manifest.parts)
        raise FileFormatError(f"{folder} is a package of kind '{manifest.kind}', not of stages: give a part ({parts})")
    return manifest


def run_chain(
    folder: str | Path, feeds: Mapping[str, Any], *, opened: Callable[[Path], Any] = open_session
) -> dict[str, Any]:
    """Run the stages of a package, one loaded at a time; values are dropped after their last use.

    Args:
        feeds: Arrays, or tensors of PyTorch, for the inputs of the whole model, by name; optional ones may be left out.
        opened: Opens a session for a stage's file.

    Returns:
        The outputs of the whole model, by name: the outputs of stages that no later stage takes, and those that a stage
        takes but that are outputs of the model as well.

    Raises:
        FileFormatError: The folder is not a package of stages.
        InputsError: An input is missing, or NumPy cannot read a tensor.
        UsageError: ONNX Runtime cannot run a stage.
    """
    manifest = read_stages(folder)
    values = {
        name: array_of_input(name, value) if hasattr(value, "__array__") else value for name, value in feeds.items()
    }
    outputs: dict[str, Any] = {}
    for part in manifest.parts:
        if missing := [name for name in part.inputs if name not in values]:
            raise InputsError(f"{part.file} of {folder} needs {', '.join(missing)}: give all inputs of the model")
        runs = opened(Path(folder, part.file))
        taken = [*part.inputs, *(value.name for value in runs.get_overridable_initializers())]
        results = run_session(runs, {name: values[name] for name in taken if name in values})
        values |= results
        outputs |= results
    return outputs


def verify_stages(folder: str | Path, whole: Source, *, provider: str = CPU, seed: int = 0) -> StagesReport:
    """Run the stages one after the other, and the whole file, on the same random inputs, and compare every output.

    Raises:
        FileFormatError: The folder is not a package of stages, or the file cannot be read.
        InputsError: No random inputs fit.
        UsageError: ONNX Runtime cannot run a file, or the stages are not of this file.
    """
    read_stages(folder)
    tagged = read_tagged(whole)
    session = open_session(tagged.path, provider=provider)
    inputs = make_random_inputs(tagged.model, session, seed=seed)
    expected = arrays_in(run_session(session, inputs))
    results = arrays_in(run_chain(folder, inputs, opened=lambda path: open_session(path, provider=provider)) | inputs)
    if missing := [name for name in expected if name not in results]:
        raise UsageError(f"{folder} does not return {', '.join(missing)}: it was not made from {tagged.path}")
    differences = [compare_arrays(name, array, results[name]) for name, array in expected.items()]
    return StagesReport(without_random(differences, expected, run_session(session, inputs)))

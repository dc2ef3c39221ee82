"""``export_package``: export a model to a folder of graphs that share one set of weights. Read this file first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from modelexport.capture import FrontEnd
from modelexport.capture.exported import Exported
from modelexport.core.stages import Stages
from modelexport.errors import InputsError
from modelexport.exporting.interface import AS_CAPTURED
from modelexport.exporting.options import Keywords, Options
from modelexport.exporting.packages.folders import check_package_folder, replaced_whole
from modelexport.exporting.packages.layouts import write_layouts
from modelexport.exporting.packages.modes import PartsMode
from modelexport.exporting.packages.naming import name_generation, name_pipeline
from modelexport.exporting.packages.weights import share_weights
from modelexport.exporting.pipeline import export
from modelexport.exporting.result import ExportResult
from modelexport.format.packages import MANIFEST, PACKAGE_VERSION, Kind, Manifest, PartEntry, encode_manifest
from modelexport.pytorch.generation import ModelPart, can_generate, generation_parts
from modelexport.pytorch.pipelines import SENTENCE_TRANSFORMER, SentencePipeline, pipeline_parts

if TYPE_CHECKING:
    from torch import nn


_INTERFACES: Mapping[Kind, Callable[[Exported], Exported]] = {"generate": name_generation, "pipeline": name_pipeline}
"""The kinds of packages whose parts get the names that runtimes expect."""


@dataclass(frozen=True, kw_only=True)
class PackageResult:
    """The result of exporting a package."""

    folder: Path
    manifest: Manifest
    parts: Mapping[str, ExportResult]
    """Name of a part to its export."""
    seconds: Mapping[str, float]
    """Stage to wall time, of all parts together."""
    notes: Sequence[str]
    """Notes for the user, one line each."""
    files: Sequence[Path]
    graph_bytes: int
    """Bytes of the graphs, without weights."""
    weight_bytes: int
    """Bytes of the weights files."""

    @property
    def agrees(self) -> bool:
        """Whether every verified part agrees with the model."""
        return all(part.verified is None or part.verified.agrees for part in self.parts.values())


def export_package(
    model: nn.Module,
    folder: str | Path,
    *,
    inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    parts: PartsMode = "auto",
    name: str | None = None,
    directory: str | Path | None = None,
    frontend: FrontEnd = "auto",
    opset: int | None = None,
    optimized: bool = True,
    options: Options | None = None,
    stages: Stages | None = None,
    **keywords: Unpack[Keywords],
) -> PackageResult:
    """Export a model to a folder: the graphs that it runs, their weights once, and the files that runtimes need.

    Args:
        model: Any ``nn.Module``. A transformers model that can ``generate`` becomes the parts that generation runs.
        folder: The folder to write; an existing package is replaced as a whole.
        inputs: Example inputs for a model that is exported whole. Those of parts are generated.
        parts: What the package consists of.
        name: The model's name in the documents; by default its class.
        directory: The model's folder with its configuration and tokenizer, which are copied into the package.
        frontend, opset, optimized, options: As in :func:`modelexport.export`, for every part.
        stages: Times the stages of the export and reports the running one.

    Raises:
        CaptureError: A part cannot be exported, or ``generate`` cannot be split.
        InputsError: ``parts`` asks for generation and the model cannot generate, or inputs are missing.
        OutputError: The folder cannot be written. An existing package is unchanged.
        UntaggedNodeError: A node has no owner. Nothing is written.
    """
    folder, stages = Path(folder), stages or Stages()
    lies_in = None if directory is None else Path(directory)
    options = (options or Options()).replaced_by(keywords)
    check_package_folder(folder, lies_in)
    with stages("parts"):
        kind, found = _parts_of(model, parts, inputs)
    with replaced_whole(folder) as staging:
        with stages("weights"):
            shared = share_weights(model, options.weights.source, staging, options.weights.weights)
        linked = replace(options, weights=replace(options.weights, weights="link", source=shared))
        export_part = partial(
            export,
            name=name,
            frontend=frontend,
            dynamic=True,
            opset=opset,
            optimized=optimized,
            interface=_INTERFACES.get(kind, AS_CAPTURED),
            options=linked,
        )
        results, seconds = _export_each(found, export_part, staging, stages)
        manifest = _manifest(kind, found, results, [file.path.name for file in shared.files])
        (staging / MANIFEST).write_bytes(encode_manifest(manifest))
        notes = [*_notes(kind, found, results), *write_layouts(model, lies_in, staging, manifest, found)]
        return _result(folder, staging, manifest, results, seconds, notes)


def _parts_of(
    model: nn.Module, parts: PartsMode, inputs: Mapping[str, Any] | Sequence[Any] | None
) -> tuple[Kind, list[ModelPart]]:
    if parts == "generate" or (parts == "auto" and can_generate(model)):
        return "generate", generation_parts(model)
    if parts == "pipeline" or (parts == "auto" and isinstance(model, SentencePipeline)):
        if not isinstance(model, SentencePipeline):
            raise InputsError(f"{type(model).__name__} is not a pipeline: give a folder with {SENTENCE_TRANSFORMER}")
        return "pipeline", pipeline_parts(model)
    if inputs is None:
        from modelexport.pytorch.inputs import generate_inputs

        inputs = generate_inputs(model)
    return "whole", [ModelPart("model", model, inputs)]


def _export_each(
    parts: Sequence[ModelPart], export_part: Callable[..., ExportResult], folder: Path, stages: Stages
) -> tuple[dict[str, ExportResult], dict[str, float]]:
    """Name of a part to its export; stage to wall time, of all parts together and of what came before them."""
    seconds: dict[str, float] = dict(stages.seconds)
    results: dict[str, ExportResult] = {}
    for part in parts:
        own = stages.within(part.name)
        results[part.name] = export_part(part.model, part.inputs, folder / f"{part.name}.onnx", stages=own)
        for stage, took in own.seconds.items():
            seconds[stage] = seconds.get(stage, 0.0) + took
    return results, seconds


def _notes(kind: Kind, parts: Sequence[ModelPart], results: Mapping[str, ExportResult]) -> list[str]:
    notes = [f"{part.name}: {note}" for part in parts for note in part.notes]
    if kind == "generate":
        notes += [note for name, result in results.items() for note in _fixed_axes(name, result)]
    return notes


def _fixed_axes(part: str, result: ExportResult) -> list[str]:
    """Notes on a part that does not accept every batch size or every number of tokens."""
    return [
        f"{part}: {what} of {value.name} is always {size}: the model's code fixes it"
        for value in result.hierarchy.inputs
        if value.name.endswith("input_ids")
        for what, size in zip(("the batch", "the number of tokens"), value.shape, strict=False)
        if isinstance(size, int)
    ]


def _manifest(
    kind: Kind, parts: Sequence[ModelPart], results: Mapping[str, ExportResult], weights: list[str]
) -> Manifest:
    entries = [
        PartEntry(
            name=part.name,
            file=f"{part.name}.onnx",
            module=part.module,
            inputs=[value.name for value in results[part.name].hierarchy.inputs],
            outputs=[value.name for value in results[part.name].hierarchy.outputs],
        )
        for part in parts
    ]
    return Manifest(format_version=PACKAGE_VERSION, kind=kind, parts=entries, weights=weights)


def _result(
    folder: Path,
    staging: Path,
    manifest: Manifest,
    results: Mapping[str, ExportResult],
    seconds: Mapping[str, float],
    notes: Sequence[str],
) -> PackageResult:
    """The result for the files in ``staging``, with their later paths in ``folder``."""
    written = sorted(file.relative_to(staging) for file in staging.rglob("*") if file.is_file())
    return PackageResult(
        folder=folder,
        manifest=manifest,
        parts=results,
        seconds=seconds,
        notes=notes,
        files=[folder / file for file in written],
        graph_bytes=sum((staging / part.file).stat().st_size for part in manifest.parts),
        weight_bytes=sum((staging / file).stat().st_size for file in manifest.weights),
    )

"""``export_package``: a model becomes a folder of graphs that share one set of weights. The page to read first here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from modelexport.capture import FrontEnd
from modelexport.capture.exported import Exported
from modelexport.core.stages import Stages
from modelexport.errors import InputsError
from modelexport.exporting.interface import AS_CAPTURED
from modelexport.exporting.options import Keywords, Options
from modelexport.exporting.packages.folders import write_manifest
from modelexport.exporting.packages.layouts import write_layouts
from modelexport.exporting.packages.modes import PartsMode
from modelexport.exporting.packages.naming import name_generation, name_pipeline
from modelexport.exporting.packages.weights import share_weights
from modelexport.exporting.pipeline import export
from modelexport.exporting.result import ExportResult
from modelexport.files.atomic import written_together
from modelexport.files.package_folders import check_package_folder
from modelexport.format.packages import MANIFEST, PACKAGE_VERSION, Kind, Manifest, PartEntry
from modelexport.pytorch.generation import ModelPart, can_generate, generation_parts
from modelexport.pytorch.pipelines import SENTENCE_TRANSFORMER, SentencePipeline, pipeline_parts

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class PackageResult:
    """What a package consists of and how its export went."""

    folder: Path
    manifest: Manifest
    parts: Mapping[str, ExportResult]
    """Name of a part to its export."""
    seconds: Mapping[str, float]
    """Stage to wall time, of all parts together."""
    notes: Sequence[str]
    """What a person should know, one line each."""
    files: Sequence[Path]
    graph_bytes: int
    """Of the graphs, without weights."""
    weight_bytes: int
    """Of the files of the weights."""

    @property
    def agrees(self) -> bool:
        """Whether no part that was verified differs from the model."""
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
    """Export a model to a folder: the graphs that it runs, their weights once, and what runtimes want beside them.

    Args:
        model: Any ``nn.Module``. One of transformers that can ``generate`` gives what generation runs.
        folder: Made if need be; the files of a package that is there are replaced, or removed.
        inputs: Example inputs for a model that is exported whole. Parts make their own.
        parts: What the package consists of.
        name: What the documents call the model; its class if left out.
        directory: Where the model lies with its configuration and tokenizer, which are copied into the package.
        frontend, opset, optimized, options: As in :func:`modelexport.export`, for every part.
        stages: Times the stages of the export; says on the way which one is running.

    Raises:
        CaptureError: A part cannot be exported, or ``generate`` cannot be taken apart.
        InputsError: The model cannot generate and was to, or has no inputs.
        OutputError: The folder cannot be written. What was there before is still there.
        UntaggedNodeError: A node has no owner. Nothing is written.
    """
    folder, stages = Path(folder), stages or Stages()
    options = (options or Options()).replaced_by(keywords)
    reads = [] if directory is None else [Path(directory)]
    check_package_folder(folder, reads)
    with stages("parts"):
        kind, found = _parts_of(model, parts, inputs)
    seconds: dict[str, float] = dict(stages.seconds)
    results: dict[str, ExportResult] = {}
    with written_together(folder, reads, make=True, package=True) as staging:
        with stages("weights"):
            shared = share_weights(model, options.weights.source, staging, options.weights.weights)
        linked = replace(options, weights=replace(options.weights, weights="link", source=shared))
        seconds |= stages.seconds
        for part in found:
            own = Stages(lambda stage, part=part: stages.tell(f"{part.name}: {stage}"))  # type: ignore[misc]
            results[part.name] = export(
                part.model,
                part.inputs,
                staging / f"{part.name}.onnx",
                name=name,
                frontend=frontend,
                dynamic=True,
                opset=opset,
                optimized=optimized,
                interface=_interface_of(kind),
                options=linked,
                stages=own,
            )
            for stage, took in own.seconds.items():
                seconds[stage] = seconds.get(stage, 0.0) + took
        manifest = _manifest(kind, found, results, [file.path.name for file in shared.files])
        notes = [f"{part.name}: {note}" for part in found for note in part.notes]
        if kind == "generate":
            notes += [note for name, result in results.items() for note in _fixed_axes(name, result)]
        notes += write_layouts(model, None if directory is None else Path(directory), staging, manifest, found)
        graph_bytes = sum((staging / part.file).stat().st_size for part in manifest.parts)
        weight_bytes = sum((staging / file).stat().st_size for file in manifest.weights)
        names = write_manifest(manifest, staging)
    return PackageResult(
        folder=folder,
        manifest=manifest,
        parts=results,
        seconds=seconds,
        notes=notes,
        files=sorted(folder / name for name in (*names, MANIFEST)),
        graph_bytes=graph_bytes,
        weight_bytes=weight_bytes,
    )


def _parts_of(
    model: nn.Module, parts: PartsMode, inputs: Mapping[str, Any] | Sequence[Any] | None
) -> tuple[Kind, list[ModelPart]]:
    if parts == "generate" or (parts == "auto" and can_generate(model)):
        return "generate", generation_parts(model)
    if parts == "pipeline" or (parts == "auto" and isinstance(model, SentencePipeline)):
        if not isinstance(model, SentencePipeline):
            raise InputsError(f"{type(model).__name__} is no pipeline: give a folder with {SENTENCE_TRANSFORMER}")
        return "pipeline", pipeline_parts(model)
    if inputs is None:
        from modelexport.pytorch.inputs import example_inputs

        inputs = example_inputs(model)
    return "whole", [ModelPart("model", model, inputs)]


def _fixed_axes(part: str, result: ExportResult) -> list[str]:
    """What a person should know of a part that does not take any batch or any number of tokens."""
    return [
        f"{part}: {what} of {value.name} is always {size}: the model's own code fixes it"
        for value in result.hierarchy.inputs
        if value.name.endswith("input_ids")
        for what, size in zip(("the batch", "the number of tokens"), value.shape, strict=False)
        if isinstance(size, int)
    ]


def _interface_of(kind: Kind) -> Callable[[Exported], Exported]:
    names = {"generate": name_generation, "pipeline": name_pipeline}
    return names.get(kind, AS_CAPTURED)


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

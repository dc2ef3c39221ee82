"""``export_package``: export a model to a folder of graphs that share one set of weights. Read this file first."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from modelexport.capture.exported import Exported
from modelexport.core.results import Rows, Written
from modelexport.core.stages import Stages
from modelexport.core.text import error_line, plural
from modelexport.errors import CaptureError, CheckError, InputsError, ModelExportError, UsageError
from modelexport.exporting import PartsMode
from modelexport.exporting.options import Keywords, Options, PackageOptions, WeightOptions
from modelexport.exporting.pipeline import export
from modelexport.exporting.result import ExportResult
from modelexport.files.atomic import written_together
from modelexport.files.manifests import write_manifest
from modelexport.files.package_folders import check_package_folder
from modelexport.format.manifest import PACKAGE_VERSION, Kind, Manifest, PartEntry
from modelexport.packages.diffusion.components_module import (
    MODEL_INDEX,
    PipelineModules,
    as_module,
    is_diffusion_pipeline,
)
from modelexport.packages.diffusion.diffusion_parts import diffusion_parts, model_parts
from modelexport.packages.diffusion.observing import observe_example
from modelexport.packages.generation_parts import DecoderForm, can_generate, generation_forms
from modelexport.packages.generator import generation_of
from modelexport.packages.loader_layouts import write_layouts
from modelexport.packages.model_parts import ModelPart
from modelexport.packages.part_names import BATCH, name_axes, name_generation, name_pipeline
from modelexport.packages.sentence_pipelines import SENTENCE_TRANSFORMER, SentencePipeline, pipeline_parts
from modelexport.packages.shared_weights import share_components, share_weights
from modelexport.packages.verifying_generation import run_once
from modelexport.weights.sources import Weights

if TYPE_CHECKING:
    from torch import nn


_INTERFACES: Mapping[Kind, Callable[[Exported], Exported]] = {"generate": name_generation, "pipeline": name_pipeline}
"""The kinds of packages whose parts get the names that runtimes expect."""


@dataclass(frozen=True, kw_only=True)
class PackageResult(Written):
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

    def __repr__(self) -> str:
        return (
            f"<PackageResult {self.folder}: {self.manifest.kind}, parts {', '.join(self.parts)}, "
            f"{self.weight_bytes:,} bytes of weights, {plural(len(self.files), 'file')}>"
        )

    @property
    def path(self) -> Path:
        """The folder."""
        return self.folder

    def _table(self) -> Rows:
        yield "part", "what"
        yield from self.parts.items()

    @property
    def agrees(self) -> bool:
        """Whether every verified part agrees with the model."""
        return all(part.verified is None or part.verified.agrees for part in self.parts.values())


def export_package(
    model: nn.Module | Any,
    folder: str | Path,
    *,
    inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    name: str | None = None,
    directory: str | Path | None = None,
    options: Options | None = None,
    stages: Stages | None = None,
    progress: Callable[[str], None] = lambda stage: None,
    **keywords: Unpack[Keywords],
) -> PackageResult:
    """Export a model to a folder: the graphs that it runs, their weights once, and the files that runtimes need.

    Args:
        model: Any ``nn.Module``, or a pipeline of diffusers. A model of transformers that can ``generate`` gives what
            generation runs, a pipeline what its run calls.
        folder: Made if need be; the files of a package that is there are replaced, or removed.
        inputs: Example inputs for a model that is exported whole, arguments for the example run of a pipeline of
            diffusers, or the size of images for one that generates and takes it (``image_grid_thw``). Other parts make
            their own.
        name: The model's name in the documents; by default its class.
        directory: The model's folder with its configuration and tokenizer, which are copied into the package.
        options: What the package consists of, and for every part the same as in :func:`modelexport.export`; each
            option is a keyword as well.
        stages: Times the stages of the export.
        progress: Called with the name of each stage as it begins, if ``stages`` are not given.

    Raises:
        CaptureError: A part cannot be exported, or ``generate`` cannot be split.
        InputsError: ``parts`` asks for generation and the model cannot generate, or inputs are missing.
        OutputError: The folder cannot be written. An existing package is unchanged.
        UntaggedNodeError: A node has no owner. Nothing is written.
    """
    folder, stages = Path(folder), stages or Stages(progress)
    lies_in = None if directory is None else Path(directory)
    options = (options or Options()).replaced_by(keywords)
    options.check_together(package=True)
    if is_diffusion_pipeline(model):
        model = as_module(model)
    check_package_folder(folder, [] if lies_in is None else [lies_in])
    with stages("parts"):
        asked = options.package
        form = DecoderForm(static_cache=asked.static_cache, separate_prefill=asked.separate_prefill)
        form.check()
        given = inputs if isinstance(inputs, Mapping) else None
        kind, made = _parts_of(model, asked.parts or "auto", inputs, form, options.weights.to_check)
        forms = iter(made)
        best = next(forms)
    with written_together(folder, [] if lies_in is None else [lies_in], make=True, package=True) as staging:
        with stages("weights"):
            shared = _share(model, best, lies_in, staging, options.weights)
        export_part = partial(export, name=name)
        for_parts = replace(options, package=PackageOptions())

        def exported(found: Sequence[ModelPart]) -> PackageResult:
            results, seconds, left_out = _export_each(kind, found, export_part, shared, for_parts, staging, stages)
            found = [part for part in found if part.name in results]
            files = [file.path.relative_to(staging).as_posix() for part in found for file in shared[part.name].files]
            weights = sorted(set(files))
            manifest = _manifest(kind, found, results, weights)
            if manifest.generation is not None:
                with stages("generate"):
                    left_out += run_once(model, manifest, staging, results, given, options)
            notes = [*left_out, *_notes(found), *write_layouts(model, lies_in, staging, manifest, found)]
            write_manifest(manifest, staging)
            return _result(folder, staging, manifest, results, seconds, notes)

        return _first_that_passes(best, forms, exported, staging)


def _first_that_passes(
    best: Sequence[ModelPart],
    others: Iterator[Sequence[ModelPart]],
    export_form: Callable[[Sequence[ModelPart]], PackageResult],
    staging: Path,
) -> PackageResult:
    """The package of the first form whose parts can be captured and generate what the model does.

    Raises:
        CaptureError, CheckError, UsageError: There is none. What was wrong with the best one.
    """
    try:
        return export_form(best)
    except (UsageError, CheckError) as error:
        wrong: ModelExportError = error
        _remove(best, staging)
    try:
        for form in others:
            try:
                result = export_form(form)
            except (UsageError, CheckError):
                _remove(form, staging)
            else:
                told = f"the first form of its parts was not used: {error_line(wrong)}"
                return replace(result, notes=[*result.notes, told])
    except CaptureError:  # there is no other form
        pass
    raise wrong


def _remove(form: Sequence[ModelPart], staging: Path) -> None:
    for part in form:
        for file in staging.glob(f"{part.path.removesuffix('.onnx')}.*"):
            file.unlink()


def _parts_of(
    model: nn.Module,
    parts: PartsMode,
    inputs: Mapping[str, Any] | Sequence[Any] | None,
    form: DecoderForm,
    weights: Weights | None,
) -> tuple[Kind, Iterable[list[ModelPart]]]:
    """The kind of the package, and the forms that its parts may have, the best first; those of generation are made when
    they are asked for.
    """
    if parts == "generate" or (parts == "auto" and can_generate(model)):
        return "generate", generation_forms(model, form, inputs if isinstance(inputs, Mapping) else None, weights)
    if form != DecoderForm():
        raise InputsError("--static-cache and --separate-prefill are for a model that generates: leave them out")
    if isinstance(model, PipelineModules):
        if parts == "whole":
            raise InputsError(f"{type(model).__name__} is not one model: leave out --parts whole")
        observed, _ = observe_example(model, inputs if isinstance(inputs, Mapping) else None, steps=2)
        return "pipeline", [model_parts(model, diffusion_parts(model, observed), observed.inside)]
    if parts == "pipeline" or (parts == "auto" and isinstance(model, SentencePipeline)):
        if not isinstance(model, SentencePipeline):
            raise InputsError(
                f"{type(model).__name__} is not a pipeline: give a folder with {SENTENCE_TRANSFORMER} or {MODEL_INDEX}"
            )
        return "pipeline", [pipeline_parts(model)]
    if inputs is None:
        from modelexport.pytorch.inputs import generate_inputs

        inputs = generate_inputs(model)
    return "whole", [[ModelPart("model", model, inputs)]]


def _share(
    model: nn.Module, parts: Sequence[ModelPart], directory: Path | None, folder: Path, options: WeightOptions
) -> Mapping[str, Weights]:
    """Name of a part to the places of the weights that it uses, which are written once for all parts."""
    if isinstance(model, PipelineModules):
        return share_components(parts, directory, folder, options.weights)
    weights = share_weights(model, options.source, folder, options.weights)
    return defaultdict(lambda: weights)


def _export_each(
    kind: Kind,
    parts: Sequence[ModelPart],
    export_part: Callable[..., ExportResult],
    shared: Mapping[str, Weights],
    options: Options,
    folder: Path,
    stages: Stages,
) -> tuple[dict[str, ExportResult], dict[str, float], list[str]]:
    """Name of a part to its export; stage to wall time, of all parts together and of what came before them; notes on
    optional parts that cannot be captured.
    """
    notes: list[str] = []
    fused = options.graph.fuse is not None
    seconds: dict[str, float] = dict(stages.seconds)
    results: dict[str, ExportResult] = {}
    for part in parts:
        own = stages.within(part.name)
        linked = replace(options, weights=replace(options.weights, weights="link", source=shared[part.name]))
        keywords = _of_one_row(part) if fused else {}
        if part.constants:
            linked = linked.replaced_by({"constants": [*options.capture.constants, *part.constants]})
        try:
            results[part.name] = export_part(
                part.model,
                part.inputs,
                folder / part.path,
                interface=partial(name_axes, axes=part.axes) if part.axes else _INTERFACES.get(kind),
                dynamic=not part.constants,  # what depends on the values of constants has their sizes
                options=linked,
                stages=own,
                **keywords,
            )
        except (CaptureError, CheckError) as error:
            if not part.optional:
                raise
            shutil.rmtree((folder / part.path).parent)
            notes.append(f"{part.name} was left out; the pipeline can do without it: {error_line(error)}")
        for stage, took in own.seconds.items():
            seconds[stage] = seconds.get(stage, 0.0) + took
    return results, seconds, notes


def _notes(parts: Sequence[ModelPart]) -> list[str]:
    return [f"{part.name}: {note}" for part in parts for note in part.notes]


def _of_one_row(part: ModelPart) -> Keywords:
    """The options of a part that, fused, refuses several new tokens after a cache for more than one row."""
    return {} if part.row is None else {"row": BATCH, "checked": part.row}


def _manifest(
    kind: Kind, parts: Sequence[ModelPart], results: Mapping[str, ExportResult], weights: list[str]
) -> Manifest:
    entries = [
        PartEntry(
            name=part.name,
            file=part.path,
            module=part.module,
            inputs=[value.name for value in results[part.name].hierarchy.inputs],
            outputs=[value.name for value in results[part.name].hierarchy.outputs],
        )
        for part in parts
    ]
    how = None
    if kind == "generate":
        described = {part.name: results[part.name].hierarchy for part in parts}
        how = generation_of(
            {name: one.inputs for name, one in described.items()},
            {name: [one.name for one in one_of.outputs] for name, one_of in described.items()},
            next((part.rows for part in parts if part.rows != "padded"), "padded"),
        )
    return Manifest(format_version=PACKAGE_VERSION, kind=kind, parts=entries, weights=weights, generation=how)


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
        weight_bytes=sum(
            {one.st_ino: one.st_size for file in manifest.weights if (one := (staging / file).stat())}.values()
        ),
    )

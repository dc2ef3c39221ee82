"""``export_package``: export a model to a folder of graphs that share one set of weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport.core.declared_options import with_keywords_of
from modelexport.core.result_display import Rows as TableRows
from modelexport.core.result_display import Written
from modelexport.core.text import error_line, plural
from modelexport.core.timed_stages import Stages, with_progress
from modelexport.errors import CaptureError, CheckError, ModelExportError, UsageError
from modelexport.exporting.export_result import ExportResult
from modelexport.exporting.options import Options, PackageOptions
from modelexport.exporting.pipeline import export_with
from modelexport.exporting.steps import AsPart
from modelexport.files.manifest_file import write_manifest
from modelexport.files.output_folders import check_package_folder
from modelexport.format.package_manifest import PACKAGE_VERSION, Manifest, PartEntry
from modelexport.packages.generation_loop import BATCH
from modelexport.packages.input_and_axis_names import name_axes_of_part
from modelexport.packages.model_parts import ModelPart, with_weights
from modelexport.packages.package_kinds import AUTO, PackageKind, Request, as_module, kind_for_model
from modelexport.runtime.checked_writing import checked_and_written
from modelexport.weights.bytes_of_entries import Weights

if TYPE_CHECKING:
    from torch import nn


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

    def _table(self) -> TableRows:
        yield "part", "what"
        yield from self.parts.items()

    @property
    def agrees(self) -> bool:
        """Whether every verified part agrees with the model."""
        return all(part.verified is None or part.verified.agrees for part in self.parts.values())


@with_keywords_of(Options())
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
    **keywords: Any,
) -> PackageResult:
    """Export a model to a folder: the graphs that it runs, their weights once, and the files that runtimes need.

    Args:
        model: Any ``nn.Module``, or a pipeline of diffusers. A model of transformers that can ``generate`` gives what
            generation runs, a pipeline what its run calls.
        folder: Made if need be; the files of a package that is there are replaced, or removed.
        inputs: Example inputs for a model that is exported whole, or by part where ``parts`` names them; arguments for
            the example run of a pipeline of diffusers; or the size of images for a model that generates and takes it
            (``image_grid_thw``). Other parts make their own.
        name: The model's name in the documents; by default its class.
        directory: The model's folder with its configuration and tokenizer, which are copied into the package.
        options: All of the options below in one value; those that are given as keywords as well replace its own.
        stages: Times the stages of the export.
        progress: Called with the name of each stage as it begins, if ``stages`` are not given.

    Raises:
        CaptureError: A part cannot be exported, or ``generate`` cannot be split.
        InputsError: ``parts`` asks for generation and the model cannot generate, or inputs are missing.
        OutputError: The folder cannot be written. An existing package is unchanged.
        UntaggedNodeError: A node has no owner. Nothing is written.
    """
    folder, stages = Path(folder), stages or Stages(progress)
    model_folder = None if directory is None else Path(directory)
    options = (options or Options()).replaced_by(keywords)
    options.check_together(package=True)
    if options.capture.dynamic is False:
        raise UsageError("the axes of a package are dynamic: fix those of a part that you name, Part(dynamic=False)")
    model = as_module(model)
    check_package_folder(folder, [] if model_folder is None else [model_folder])
    with stages("parts"):
        kind = kind_for_model(model, AUTO if options.package.parts is None else options.package.parts)
        kind.check_options(options.package)
        request = Request(model, inputs, model_folder, options)
        forms = iter(kind.forms(request))
        best = next(forms)
    with checked_and_written(
        folder, [] if model_folder is None else [model_folder], make=True, package=True, check=False
    ) as staging:
        with stages("weights"):
            shared = kind.share_weights(request, best, staging)

        def exported(form: Sequence[ModelPart]) -> PackageResult:
            results, seconds, notes = _export_each(kind, form, name, shared, options, staging, stages)
            form = [part for part in form if part.name in results]
            places = {file.path.relative_to(staging).as_posix() for part in form for file in shared[part.name].files}
            manifest = kind.completed(_manifest(kind, form, results, sorted(places)), model, form, results)
            with stages(kind.does or "comparison"):
                notes += check_package(kind, request, manifest, staging, results)
            notes += [f"{part.name}: {note}" for part in form for note in part.notes]
            notes += kind.write_layouts(request, staging, manifest, form)
            write_manifest(manifest, staging)
            written = {file.relative_to(staging): file.stat() for file in staging.rglob("*") if file.is_file()}
            heavy = {written[Path(file)].st_ino: written[Path(file)].st_size for file in manifest.weights}
            return PackageResult(
                folder=folder,
                manifest=manifest,
                parts=results,
                seconds=seconds,
                notes=notes,
                files=[folder / file for file in sorted(written)],
                graph_bytes=sum(written[Path(part.file)].st_size for part in manifest.parts),
                weight_bytes=sum(heavy.values()),
            )

        return first_form_that_passes(chain([best], forms), exported, staging)


def first_form_that_passes(
    forms: Iterable[Sequence[ModelPart]], export_form: Callable[[Sequence[ModelPart]], PackageResult], staging: Path
) -> PackageResult:
    """The package of the first form whose parts can be captured and generate what the model does.

    Raises:
        CaptureError, CheckError, UsageError: No form passes. The message is that of the best one.
    """
    wrong: ModelExportError | None = None
    try:
        for form in forms:
            try:
                result = export_form(form)
            except (CaptureError, UsageError, CheckError) as error:
                wrong = wrong or error
                for file in chain(*(staging.glob(f"{part.path.removesuffix('.onnx')}.*") for part in form)):
                    file.unlink()
            else:
                more = [] if wrong is None else [f"the first form of its parts was not used: {error_line(wrong)}"]
                return replace(result, notes=[*result.notes, *more])
    except CaptureError:
        if wrong is None:
            raise
    assert wrong is not None
    raise wrong


_NOT_RUN = ("loading", "running")
"""The steps of a check that show that a part does not run here."""


def check_package(
    kind: PackageKind, request: Request, manifest: Manifest, folder: Path, results: Mapping[str, ExportResult]
) -> list[str]:
    """Run the parts on other batches than that of the export, and compare with the library, if its kind can.

    Args:
        results: The export of each part. Where one was not to be checked, or has no weights here, nothing is run.

    Returns:
        Notes, a line each.
    """
    if not kind.does:
        return []
    notes: list[str] = []
    checks = {name: result.check for name, result in results.items()}
    fault = next((f"{name}: {check.reason}" for name, check in checks.items() if check and check.step in _NOT_RUN), "")
    problem = f"the package cannot run {kind.example} here"
    if not fault:
        if any(check is None or check.status != "passed" for check in checks.values()):
            return []
        problem = f"the package does not {kind.does} what the model does"
        uncalled = [{check.path for check in each.hierarchy.modules if not check.calls} for each in results.values()]
        try:
            with with_weights(request.model, request.options.weights.lent, set[str].intersection(*uncalled)):
                fault = kind.find_fault(request, manifest, folder, notes)
        except ModelExportError as error:
            fault = error_line(error)
    if not fault:
        return notes
    if request.options.checks.keep_anyway:
        return [*notes, f"{problem}: {fault}"]
    raise CheckError(
        f"{problem}, and was not written: {fault}; --keep-anyway (keep_anyway=True) writes it nevertheless",
        reason=fault,
    )


def _export_each(
    kind: PackageKind,
    parts: Sequence[ModelPart],
    name: str | None,
    shared: Mapping[str, Weights],
    options: Options,
    folder: Path,
    stages: Stages,
) -> tuple[dict[str, ExportResult], dict[str, float], list[str]]:
    """Name of a part to its export; stage to wall time, of all parts together and of what came before them; notes on
    optional parts that cannot be captured.
    """
    stepwise = set(kind.keeps_as_inputs).intersection(options.capture.constants)
    reason = "is an input all the same: the loop gives it other values in each step"
    notes = [f"{input_name} {reason}" for input_name in sorted(stepwise)]
    constants = [input_name for input_name in options.capture.constants if input_name not in stepwise]
    seconds: dict[str, float] = dict(stages.seconds)
    results: dict[str, ExportResult] = {}
    taken = {input_name for part in parts for input_name in part.inputs}
    for part in with_progress(parts):
        own_stages = stages.within(part.name)
        # A part without an argument that another part has keeps no constant for it.
        own = [input_name for input_name in constants if input_name in part.inputs or input_name not in taken]
        keywords: dict[str, Any] = {
            "interface": None,
            "constants": [*own, *part.constants],
            "dynamic": part.dynamic and not part.constants,  # what depends on the values of constants has their sizes
            "weights": "link",
            "source": shared[part.name],
        }
        as_part = AsPart(
            partial(name_axes_of_part, axes=part.axes) if part.axes else kind.name_values,
            part.row if options.graph.fuse is not None else None,
            BATCH,
        )
        linked = replace(options, package=PackageOptions()).replaced_by(keywords)
        try:
            results[part.name] = export_with(
                part.model, part.inputs, folder / part.path, linked, own_stages, name=name, part=as_part
            )
        except (CaptureError, CheckError) as error:
            if not part.optional:
                raise
            shutil.rmtree((folder / part.path).parent)
            notes.append(f"{part.name} was left out; the pipeline can do without it: {error_line(error)}")
        for stage, took in own_stages.seconds.items():
            seconds[stage] = seconds.get(stage, 0.0) + took
    return results, seconds, notes


def _manifest(
    kind: PackageKind, parts: Sequence[ModelPart], results: Mapping[str, ExportResult], weights: list[str]
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
    return Manifest(format_version=PACKAGE_VERSION, kind=kind.name, parts=entries, weights=weights)

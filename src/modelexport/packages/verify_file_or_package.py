"""``verify``: a file or a package compared with what it should compute, whichever that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from modelexport.core.result_display import Rows, Shown
from modelexport.core.text import first_few
from modelexport.errors import UsageError
from modelexport.files.path_or_model import Source, as_path

if TYPE_CHECKING:
    from modelexport.devices.device_report import DeviceReport
    from modelexport.packages.verify_by_generation import GenerationReport
    from modelexport.packages.verify_by_pipeline import PipelineReport
    from modelexport.traces.array_differences import Difference
    from modelexport.verify.against_file import AgainstReport
    from modelexport.verify.verify_report import VerifyReport


@dataclass(frozen=True, repr=False)
class PartReports(Shown):
    """The comparison of each part of a package, module by module."""

    parts: Mapping[str, VerifyReport]

    @property
    def agrees(self) -> bool:
        """Whether every part agrees."""
        return bool(self.parts) and all(report.agrees for report in self.parts.values())

    def _table(self) -> Rows:
        yield "part", "what"
        yield from self.parts.items()


@dataclass(frozen=True, repr=False)
class StagesReport(Shown):
    """The outputs of stages that run one after the other, compared with those of the whole file."""

    outputs: Sequence[Difference]

    @property
    def agrees(self) -> bool:
        """Whether every output agrees."""
        return bool(self.outputs) and all(one.status == "agree" for one in self.outputs)

    def _table(self) -> Rows:
        yield "output", "status", "largest difference"
        yield from ((one.name, one.status, one.absolute) for one in self.outputs)


Report: TypeAlias = (
    "VerifyReport | AgainstReport | DeviceReport | GenerationReport | PipelineReport | PartReports | StagesReport"
)


@overload
def verify(file: Source, /, *, device: str, **how: Any) -> DeviceReport: ...
@overload
def verify(file: Source, /, *, against: None = None, **how: Any) -> VerifyReport: ...
@overload
def verify(file: Source, /, *, against: Source, **how: Any) -> AgainstReport | StagesReport: ...
@overload
def verify(model: Any, inputs: Any, file: Source, /, **how: Any) -> Any: ...
def verify(
    first: Any, inputs: Any = None, file: Any = None, /, *, against: Any = None, progress: Any = None, **how: Any
) -> Any:
    """Compare a file or a package with its model, with another file, or with the values that were stored beside it.

    ========================================  ===============================================  ======================
    call                                      compares                                         returns
    ========================================  ===============================================  ======================
    ``verify(model, inputs, "a.onnx")``       every call and output with PyTorch               ``VerifyReport``
    ``verify("a.onnx")``                      the same with the values of ``reference=True``   ``VerifyReport``
    ``verify("a.onnx", device="qnn")``        the file on a device                             ``DeviceReport``
    ``verify("a.onnx", against="b.onnx")``    a file that was made from it                     ``AgainstReport``
    ``verify("stages/", against="a.onnx")``   the stages of a split file with the file         ``StagesReport``
    ``verify(model, prompts, "folder/")``     generated tokens and logits                      ``GenerationReport``
    ``verify(pipeline, arguments, "out/")``   the calls and images of a pipeline               ``PipelineReport``
    ``verify(model, inputs, "folder/")``      each part of another package                     ``PartReports``
    ========================================  ===============================================  ======================

    Args:
        inputs: Of the model; ``None`` for prompts and arguments that are made.
        progress: Called with the name of each step, where it compares with a model.
        how: ``modules`` and ``provider``, and what the function for the case takes:
            :func:`modelexport.verify.verify.verify`, :func:`modelexport.verify.against_reference.verify_reference`,
            :func:`modelexport.verify.against_file.verify_against`, :func:`modelexport.devices.check.verify_device`,
            :func:`modelexport.surgery.stage_runs.verify_stages`,
            :func:`.verify_by_generation.verify_generation`, :func:`.verify_by_pipeline.verify_pipeline`.

    Raises:
        FileFormatError, InputsError, UsageError: As these do.
    """
    if file is None:
        return _without_model(as_path(first), against, how)
    path = as_path(file)
    how |= {"tell": progress} if progress is not None else {}
    if path.is_dir():
        return _package(first, inputs, path, how)
    from modelexport.verify.verify import verify as with_model

    return with_model(first, inputs, path, **how)


def _without_model(path: Path, against: Source | None, how: Mapping[str, Any]) -> Report:
    if "device" in how and against is None and not path.is_dir():
        from modelexport.devices.check import verify_device

        return verify_device(path, **how)
    if against is None:
        if path.is_dir():
            raise UsageError(
                f"{path} is a folder: give the exported model with --model, or for stages the split file with --against"
            )
        from modelexport.verify.against_reference import verify_reference

        return verify_reference(path, **how)
    if path.is_dir():
        from modelexport.surgery.stage_runs import verify_stages

        return StagesReport(verify_stages(path, against, **how))
    from modelexport.verify.against_file import verify_against

    return verify_against(path, against, **how)


def _package(model: Any, inputs: Any, folder: Path, how: dict[str, Any]) -> Report:
    from modelexport.packages.sentence_pipelines import SentencePipeline, pipeline_parts
    from modelexport.tagged.package import read_package

    package = read_package(folder)
    match package.manifest.kind:
        case "generate":
            from modelexport.packages.generation_parts import can_generate
            from modelexport.packages.prompts import example_prompts
            from modelexport.packages.verify_by_generation import verify_generation

            if not can_generate(model):
                name = type(model).__name__
                raise UsageError(f"{name} cannot generate: give the model that {folder} was exported from")
            return verify_generation(
                model, folder, inputs or example_prompts(model, None, manifest=package.manifest), **how
            )
        case "pipeline" if not isinstance(model, SentencePipeline):
            from modelexport.packages.verify_by_pipeline import verify_pipeline

            return verify_pipeline(model, folder, arguments=inputs, **how)
        case "pipeline":
            parts = {part.name: part.inputs for part in pipeline_parts(model)}
        case "whole":
            parts = {"model": inputs}
        case kind:
            raise UsageError(f"{folder} is a package of kind {kind}: give the split file with --against")
    from modelexport.verify.verify import verify as with_model

    if unknown := [name for name in package.files if name not in parts]:
        raise UsageError(
            f"{folder} has the part {first_few(unknown)}, and the model gives {first_few(parts)}: give the model that "
            "it was exported from"
        )
    return PartReports({name: with_model(model, parts[name], file, **how) for name, file in package.files.items()})

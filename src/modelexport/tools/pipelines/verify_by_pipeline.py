"""Compares a pipeline that runs with the parts of a package with PyTorch's, call by call and in the images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from modelexport.core.limits import SCHEDULER_STEPS
from modelexport.core.result_display import Report, Rows, error_text
from modelexport.core.text import first_few
from modelexport.errors import UsageError
from modelexport.packages.part_reports import first_wrong_module, verify_parameters_of_parts
from modelexport.pytorch.inputs.named_inputs import under_names
from modelexport.pytorch.nested_tensors import as_array, copied
from modelexport.runtime.devices import CPU
from modelexport.runtime.sessions import input_names, open_session, run_session
from modelexport.tagged.package import Package, read_package
from modelexport.tools.pipelines.components_module import PipelineModules, as_module
from modelexport.tools.pipelines.diffusion_parts import DiffusionPart, diffusion_parts
from modelexport.tools.pipelines.observed_calls import Entry, leaves, observe_example, run_pipeline
from modelexport.traces.array_differences import (
    Difference,
    Verdict,
    compare_arrays,
    compare_outputs,
    relative_error,
    verdict_of,
    worst,
)
from modelexport.traces.tolerances import PIPELINE_RESULT
from modelexport.verify.verify_report import ParameterReport


class PartCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a part during the run of a pipeline."""

    part: str
    index: int
    """The number of the call among those of its part, from 0."""
    status: Verdict
    """Whether it returns what PyTorch returns for the same inputs."""
    relative: float
    """The error on the same inputs, as a share of the size of what PyTorch returns."""
    end_to_end: float | None
    """The error if all earlier calls ran in the package, too; ``None`` for a part that the run does not use."""
    reason: str = ""
    module: str | None = None
    """For the first call that differs, the address of the first module in it that does."""


class PipelineReport(Report, msgspec.Struct, frozen=True, kw_only=True):
    """A run of a pipeline by a package and by PyTorch."""

    calls: list[PartCall]
    results: list[Difference]
    """The images, or what else the pipeline returns."""
    parameters: ParameterReport
    """Of all parts: the names come after that of their part, and what several parts have counts in each."""
    in_pytorch: list[str] = []
    """The parts that the package leaves out, which ran in PyTorch."""

    def _table(self) -> Rows:
        yield "part", "call", "status", "error", "reason"
        yield from ((call.part, call.index, call.status, error_text(call.relative), call.reason) for call in self.calls)

    @property
    def agrees(self) -> bool:
        """Whether something was compared, and no call, result or parameter differs."""
        statuses = [*(call.status for call in self.calls), *(result.status for result in self.results)]
        return bool(self.calls) and verdict_of(statuses) == "agree" and self.parameters.agrees


def verify_pipeline(
    model: Any,
    folder: str | Path,
    *,
    arguments: Mapping[str, Any] | None = None,
    steps: int = SCHEDULER_STEPS,
    provider: str = CPU,
    seed: int = 0,
) -> PipelineReport:
    """Run a pipeline of diffusers in PyTorch and with the parts of its package in ONNX Runtime, and compare.

    Tokenizers, schedulers and the loop are the pipeline's own in both. Each call of a part is compared with PyTorch's
    on the same inputs, and the results of the pipeline with those of the run in PyTorch.

    Args:
        model: The pipeline, or its models as the command line loads them.
        arguments: Arguments of the pipeline that replace or complete those of the example run.
        steps: The steps of the scheduler.

    Raises:
        FileFormatError: The folder is not a package, or is damaged.
        InputsError: The pipeline fails with these arguments.
        UsageError: The package is not of this pipeline, or the parts were exported for other arguments.
    """
    modules = model if isinstance(model, PipelineModules) else as_module(model)
    package = read_package(folder)
    observed, user_inputs = observe_example(modules, arguments, steps=steps, seed=seed)
    parts = {part.entry: part for part in diffusion_parts(modules, observed)}
    names = [part.name for part in parts.values()]
    parts = _in_package(modules, package, parts)
    sessions = {
        name: open_session(file, provider=provider, optimized=True, runs_often=True)
        for name, file in package.files.items()
    }
    expected = [call for call in observed.calls if call.entry in parts]
    calls: list[PartCall] = []
    ran: list[tuple[DiffusionPart, Mapping[str, torch.Tensor]]] = []

    def compare(part: DiffusionPart, inputs: Mapping[str, torch.Tensor], output: Any, alone: Any = None) -> Any:
        """What a part returns, which is compared with PyTorch's output for these inputs and in the run without parts"""
        session = sessions[part.name]
        outputs = run_session(session, under_names(inputs, input_names(session)))
        right = _arrays(part.results(output))
        difference = worst(compare_outputs(list(right), list(right.values()), [outputs[name] for name in right]))
        assert difference is not None
        off = {name: relative_error(wanted, outputs[name]) for name, wanted in _arrays(part.results(alone)).items()}
        calls.append(
            PartCall(
                part=part.name,
                index=sum(call.part == part.name for call in calls),
                status=difference.status,
                relative=difference.relative or 0.0,
                end_to_end=None if alone is None else max(off.values(), default=0.0),
                reason=f"{difference.name}: {difference.reason}" if difference.status != "agree" else "",
            )
        )
        ran.append((part, inputs))
        return outputs

    def answer(entry: Entry, taken: dict[str, Any], run: Callable[[], Any]) -> Any:
        part, alone = parts[entry], expected[len(calls)] if len(calls) < len(expected) else None
        inputs = copied(part.tensors(taken))
        outputs = compare(part, inputs, run(), alone.output if alone is not None and alone.entry == entry else None)
        return part.result({name: torch.from_numpy(np.array(array)) for name, array in outputs.items()})

    result = run_pipeline(modules, user_inputs, answer, parts.keys(), seed=seed)
    used = {call.part for call in calls}
    for part in parts.values():
        if part.name not in used:  # it runs on its example inputs
            compare(part, part.tensors(part.arguments), part.output)
    first = next((index for index, call in enumerate(calls) if call.status != "agree"), None)
    if first is not None:
        part, inputs = ran[first]
        module = first_wrong_module(part.module(modules), inputs, package.files[part.name], provider)
        calls[first] = msgspec.structs.replace(calls[first], module=module)
    pairs = zip(_arrays(observed.result).items(), _arrays(result).values(), strict=True)
    return PipelineReport(
        calls=calls,
        # Each step adds its rounding, so that more is allowed than for one call.
        results=[compare_arrays(name, right, outputs, allowed=PIPELINE_RESULT) for (name, right), outputs in pairs],
        parameters=verify_parameters_of_parts(modules, package),
        in_pytorch=[name for name in names if name not in package.files],
    )


def _in_package(
    modules: PipelineModules, package: Package, parts: Mapping[Entry, DiffusionPart]
) -> dict[Entry, DiffusionPart]:
    """The parts that run in ONNX Runtime; those that the pipeline can do without may run in PyTorch."""
    names = {part.name for part in parts.values() if part.name in package.files or not part.is_optional(modules)}
    if names != package.files.keys():
        missing, more = sorted(names - package.files.keys()), sorted(package.files.keys() - names)
        raise UsageError(
            f"{package.folder} has {f'no part {first_few(missing, 3)}' if missing else f'the part {more[0]}'}, which "
            f"{type(modules).__name__} {'runs' if missing else 'does not run'}: it is the package of another model"
        )
    return {entry: part for entry, part in parts.items() if part.name in names}


def _arrays(value: Any) -> dict[str, Any]:
    """The arrays in a result with their names."""
    tensors = {name: leaf for name, leaf in leaves(value) if isinstance(leaf, (torch.Tensor, np.ndarray))}
    return {name: as_array(tensor) if isinstance(tensor, torch.Tensor) else tensor for name, tensor in tensors.items()}

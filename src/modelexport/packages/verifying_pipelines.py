"""Compares a pipeline that runs with the parts of a package with PyTorch's, call by call and in the images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime
import torch
from torch import nn

from modelexport.core.results import Rows, Shown, error_text
from modelexport.core.text import first_few
from modelexport.errors import UsageError
from modelexport.packages.diffusion.components_module import PipelineModules, as_module
from modelexport.packages.diffusion.diffusion_parts import DiffusionPart, diffusion_parts
from modelexport.packages.diffusion.observing import Entry, ObservedCall, observe_example, run_pipeline
from modelexport.packages.verifying_generation import wrong_parameters
from modelexport.pytorch.named_inputs import under_names
from modelexport.pytorch.nested_tensors import as_array, copied
from modelexport.runtime.sessions import CPU, input_names, open_session, run_session
from modelexport.tagged.package import Package, read_package
from modelexport.traces.differences import Difference, Verdict, compare_arrays, compare_outputs, worst
from modelexport.verify.verify import verify

_IMAGES = 1e-3
"""The largest norm of the error of a pipeline's result, as a share of its norm: each step adds its rounding."""


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
    """The same after all calls before it, too, ran in the package; ``None`` for a part that the run does not use."""
    reason: str = ""
    module: str | None = None
    """For the first call that differs, the address of the first module in it that does."""


class PipelineReport(Shown, msgspec.Struct, frozen=True, kw_only=True):
    """A run of a pipeline by a package and by PyTorch."""

    calls: list[PartCall]
    results: list[Difference]
    """The images, or what else the pipeline returns."""
    parameters_wrong: list[str]
    """Initializers of any part whose bytes differ from the model's."""
    in_pytorch: list[str] = []
    """The parts that the package leaves out, which ran in PyTorch."""

    def _table(self) -> Rows:
        yield "part", "call", "status", "error", "reason"
        yield from ((one.part, one.index, one.status, error_text(one.relative), one.reason) for one in self.calls)

    @property
    def agrees(self) -> bool:
        """Whether every call, every result and every parameter agrees."""
        statuses = [*(call.status for call in self.calls), *(result.status for result in self.results)]
        return all(status == "agree" for status in statuses) and not self.parameters_wrong


@dataclass(frozen=True)
class _Answer:
    """One call of a part, with what both returned."""

    part: DiffusionPart
    index: int
    inputs: Mapping[str, torch.Tensor]
    right: Mapping[str, Any]
    """What PyTorch returns for the same inputs."""
    found: Mapping[str, Any]


def verify_pipeline(
    model: Any,
    folder: str | Path,
    *,
    arguments: Mapping[str, Any] | None = None,
    steps: int = 4,
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
    observed, given = observe_example(modules, arguments, steps=steps, seed=seed)
    parts = {part.entry: part for part in diffusion_parts(modules, observed)}
    names = [part.name for part in parts.values()]
    parts = _in_package(modules, package, parts)
    sessions = {
        name: open_session(file, provider=provider, optimized=True, runs_often=True)
        for name, file in package.files.items()
    }
    answers, result = _run_package(modules, sessions, parts, given, seed)
    run = {one.part.name for one in answers}
    answers += [_run_alone(modules, part, sessions[part.name]) for part in parts.values() if part.name not in run]
    expected = [call for call in observed.calls if call.entry in parts]
    calls = _compare_calls(modules, package, expected, answers, provider)
    return PipelineReport(
        calls=calls,
        results=_compare_results(observed.result, result),
        parameters_wrong=wrong_parameters(modules, package),
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


def _run_alone(modules: PipelineModules, part: DiffusionPart, session: onnxruntime.InferenceSession) -> _Answer:
    """A part that the run does not use, on its example inputs."""
    inputs = part.tensors(part.arguments)
    right = {name: as_array(tensor) for name, tensor in part.results(part.output).items()}
    return _Answer(part, 0, inputs, right, run_session(session, under_names(inputs, input_names(session))))


def _run_package(
    modules: PipelineModules,
    sessions: Mapping[str, onnxruntime.InferenceSession],
    parts: Mapping[Entry, DiffusionPart],
    arguments: Mapping[str, Any],
    seed: int,
) -> tuple[list[_Answer], Any]:
    """Run the pipeline with the graphs of the package; each call runs in PyTorch as well, for the same inputs."""
    counts: Counter[str] = Counter()
    answers: list[_Answer] = []

    def answer(entry: Entry, given: dict[str, Any], run: Callable[[], Any]) -> Any:
        part = parts[entry]
        inputs = copied(part.tensors(given))
        session = sessions[part.name]
        found = run_session(session, under_names(inputs, input_names(session)))
        right = {name: as_array(tensor) for name, tensor in part.results(run()).items()}
        answers.append(_Answer(part, counts[part.name], inputs, right, found))
        counts[part.name] += 1
        return part.result({name: torch.from_numpy(np.array(array)) for name, array in found.items()})

    return answers, run_pipeline(modules, arguments, answer, parts.keys(), seed=seed)


def _compare_calls(
    modules: PipelineModules,
    package: Package,
    expected: Sequence[ObservedCall],
    answers: Sequence[_Answer],
    provider: str,
) -> list[PartCall]:
    found: list[PartCall] = []
    for position, one in enumerate(answers):
        difference = worst(_compare(one))
        assert difference is not None
        differs = difference.status != "agree"
        first = differs and all(call.status == "agree" for call in found)
        before = expected[position] if position < len(expected) and expected[position].entry == one.part.entry else None
        found.append(
            PartCall(
                part=one.part.name,
                index=one.index,
                status=difference.status,
                relative=difference.relative or 0.0,
                end_to_end=_end_to_end(one, before),
                reason=f"{difference.name}: {difference.reason}" if differs else "",
                module=_module_in(one.part.module(modules), one.inputs, package.files[one.part.name], provider)
                if first
                else None,
            )
        )
    return found


def _compare(one: _Answer) -> list[Difference]:
    """Compare what both return."""
    found = [one.found[name] for name in one.right]
    return compare_outputs(list(one.right), list(one.right.values()), found)


def _end_to_end(one: _Answer, before: ObservedCall | None) -> float | None:
    """The largest error of a call's outputs in relation to the run in PyTorch alone."""
    if before is None:
        return None
    right = {name: as_array(tensor) for name, tensor in one.part.results(before.output).items()}
    return max((compare_arrays(name, right[name], one.found[name]).relative or 0.0 for name in right), default=0.0)


def _module_in(part: nn.Module, inputs: Mapping[str, Any], file: Path, provider: str) -> str | None:
    """The first module that differs when both run one call."""
    diverging = verify(part, inputs, file, provider=provider).diverging
    return None if diverging is None else diverging.address or "."


def _compare_results(expected: Any, found: Any) -> list[Difference]:
    """Compare what a pipeline returns; each step adds its rounding, so that more is allowed than for one call."""
    pairs = zip(_arrays(expected), _arrays(found), strict=True)
    return [compare_arrays(name, one, other, allowed=_IMAGES) for (name, one), (_, other) in pairs]


def _arrays(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """The arrays in a pipeline's result with their names."""
    if isinstance(value, torch.Tensor):
        return [(name, as_array(value))]
    if isinstance(value, np.ndarray):
        return [(name, value)]
    if isinstance(value, Mapping):
        return [pair for key, part in value.items() for pair in _arrays(part, f"{name}.{key}" if name else str(key))]
    if isinstance(value, (list, tuple)):
        return [pair for index, part in enumerate(value) for pair in _arrays(part, f"{name}.{index}")]
    return []

"""Compares greedy generation of a package with the model's, token by token, prompts in one batch and alone."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from modelexport.core.limits import NEW_TOKENS
from modelexport.core.result_display import Report, Rows, error_text
from modelexport.core.text import error_line
from modelexport.core.timed_stages import with_progress
from modelexport.errors import ModelExportError, UsageError
from modelexport.format.package_manifest import Manifest
from modelexport.packages.generation_loop import CACHE_POSITION, PAST, Generator, Step
from modelexport.packages.model_parts import with_forward
from modelexport.packages.part_reports import first_wrong_module, verify_parameters_of_parts
from modelexport.runtime.devices import CPU
from modelexport.tagged.package import Package, read_package
from modelexport.tools.generate.greedy_reference import compared, first_difference, generate_greedily
from modelexport.tools.generate.observed_state import cache_argument
from modelexport.tools.generate.prompts import example_prompts
from modelexport.traces.array_differences import compare_arrays
from modelexport.verify.verify_report import ParameterReport

_TOKENS_OF_CHECK = 4


class GenerationRun(msgspec.Struct, frozen=True, kw_only=True):
    """The generation from one batch of prompts by both."""

    name: str
    """``batch``, or ``prompt 0``, ``prompt 1``, ... for a single prompt."""
    prompts: list[int]
    """The number of tokens of each prompt."""
    steps: int
    """The number of steps that both ran."""
    tokens: list[list[int]]
    """The tokens that the package generated, a list for each prompt."""
    first_wrong_token: int | None = None
    """The first step at which a row has another token."""
    first_wrong_logits: int | None = None
    """The first step at which the logits differ by more than the tolerance."""
    largest: float = 0.0
    """The largest difference of a logit in the steps before the tokens differ."""
    part: str = ""
    """The part that ran at the first wrong step."""
    module: str | None = None
    """The address of the first module that differs at the first wrong step, if one does."""
    reason: str = ""

    @property
    def agrees(self) -> bool:
        """Whether there are tokens, and each of them and every logit agrees."""
        return self.steps > 0 and self.first_wrong_token is None and self.first_wrong_logits is None


class GenerationReport(Report, msgspec.Struct, frozen=True, kw_only=True):
    """Generation by a package and by the model it was exported from."""

    runs: list[GenerationRun]
    parameters: ParameterReport
    """Of all parts: the names come after that of their part, and what several parts have counts in each."""

    def _table(self) -> Rows:
        yield "run", "steps", "largest difference", "reason"
        yield from ((run.name, run.steps, error_text(run.largest), run.reason) for run in self.runs)

    @property
    def agrees(self) -> bool:
        """Whether there are runs, and every one of them and every parameter agrees."""
        return self.parameters.agrees and bool(self.runs) and all(run.agrees for run in self.runs)


def verify_generation(
    model: nn.Module,
    folder: str | Path,
    prompts: Sequence[Mapping[str, Any]],
    *,
    new_tokens: int = NEW_TOKENS,
    provider: str = CPU,
) -> GenerationReport:
    """Generate from the same prompts in PyTorch and in ONNX Runtime and compare tokens and logits.

    Args:
        prompts: The inputs of ``generate`` for one prompt each, arrays of one row without padding; they run together,
            padded on the left if the package takes such a batch, and each alone.
        new_tokens: The maximum for each prompt; in both, a row ends with the model's own end-of-text token.

    Raises:
        FileFormatError: The folder is not a package, or is damaged.
        UsageError: It cannot generate, or is not of this model.
    """
    package = read_package(folder)
    if package.manifest.kind != "generate":
        raise UsageError(f"{folder} cannot generate: it is a package of kind {package.manifest.kind}")
    generator = Generator.of(package, provider=provider)
    together = len(prompts) > 1 and generator.how.rows == "padded"
    batches: dict[str, Sequence[Mapping[str, Any]]] = {"batch": prompts} if together else {}
    batches |= {f"prompt {index}": [prompt] for index, prompt in enumerate(prompts)}
    runs = [
        _compare(model, package, generator, name, batch, new_tokens, provider)
        for name, batch in with_progress([*batches.items()])
    ]
    return GenerationReport(runs=runs, parameters=verify_parameters_of_parts(model, package))


def _compare(
    model: nn.Module,
    package: Package,
    generator: Generator,
    name: str,
    prompts: Sequence[Mapping[str, Any]],
    new_tokens: int,
    provider: str,
) -> GenerationRun:
    reference = generate_greedily(model, prompts, new_tokens)
    wrong_token: int | None = None
    wrong_logits: int | None = None
    first: Step | None = None
    largest, reason, tokens = 0.0, "", []
    for index, (step, right, computed) in enumerate(compared(generator, reference)):
        tokens.append(step.tokens)
        difference = compare_arrays("logits", right, computed)
        largest = max(largest, difference.absolute or 0.0)
        if difference.status != "agree" and wrong_logits is None:
            wrong_logits, reason, first = index, f"logits: {difference.reason}", step
        for row in np.flatnonzero(reference.tokens[index] != step.tokens)[:1]:
            wrong_token, first = index, first or step
            reason = reason or f"row {row}: {step.tokens[row]} for {reference.tokens[index][row]}"
    module = None
    if first is not None and (ran := _step_of(model, first.feeds)) is not None:
        module = first_wrong_module(*ran, package.files[first.part], provider)
    return GenerationRun(
        name=name,
        prompts=[int(np.shape(prompt.get("input_ids", next(iter(prompt.values()))))[1]) for prompt in prompts],
        steps=len(tokens),
        tokens=np.stack(tokens, 1).tolist() if tokens else [],
        first_wrong_token=wrong_token,
        first_wrong_logits=wrong_logits,
        largest=largest,
        part=first.part if first is not None else "",
        module=module,
        reason=reason,
    )


def _step_of(model: nn.Module, feeds: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]] | None:
    """The module and the arguments that a graph's step runs; ``None`` if the cache holds more than keys and values."""
    from transformers import DynamicCache

    inputs = {name: torch.from_numpy(np.array(array)) for name, array in feeds.items()}
    caches = [name for name in inputs if name.startswith(PAST)]
    named = [f"{PAST}.{layer}.{kind}" for layer in range(len(caches) // 2) for kind in ("key", "value")]
    if {*named} != {*caches}:
        return None
    states = iter([inputs.pop(name) for name in named])
    layers = list(zip(states, states, strict=True))
    if inputs.keys() - inspect.signature(type(model).forward).parameters.keys():
        return None
    inputs[cache_argument(model)] = DynamicCache(layers)
    if CACHE_POSITION in inputs:
        from modelexport.tools.generate.fixed_caches import fixed_cache_step

        return with_forward(model, partial(fixed_cache_step, layers[0][0].shape[2])), inputs
    return model, inputs | {"use_cache": True}


def generation_fault(model: nn.Module, manifest: Manifest, folder: Path, user_inputs: Mapping[str, Any] | None) -> str:
    """What a package generates otherwise than ``generate``, from all prompts in a batch and from the first and the last
    alone; empty if nothing.
    """
    how = manifest.generation
    assert how is not None
    generator = Generator({part.name: folder / part.file for part in manifest.parts}, how)
    prompts = example_prompts(model, None, seed=1, user_inputs=user_inputs, manifest=manifest)
    alone = [prompts[:1], prompts[-1:]]
    if how.cache_size:  # a decoder, which takes tokens
        longest = how.cache_size - _TOKENS_OF_CHECK + 1
        prompts = [prompt for prompt in prompts if prompt["input_ids"].shape[1] <= longest]
        alone = [prompts[:1]]
    together = {"padded": [prompts], "equal": [prompts[:1] * 3], "one": []}[how.rows]
    for batch in filter(None, [*together, *alone]):
        sizes = ", ".join(str(len(next(iter(prompt.values()))[0])) for prompt in batch)
        reference = generate_greedily(model, batch, _TOKENS_OF_CHECK)
        try:
            difference = first_difference(generator, reference)
        except ModelExportError as error:
            difference = (
                "the model's code does something else for these lengths than for that of the example, or an axis of "
                f"size one has another size: {error_line(error)}"
            )
        if difference:
            return f"prompts of {sizes} tokens: {difference}"
    return ""

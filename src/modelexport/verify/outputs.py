"""Compares the outputs of the whole model and its file on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from modelexport.core.messages import collected
from modelexport.errors import UsageError
from modelexport.graph.nodes import nested_graphs
from modelexport.pytorch.model_run import ModelRun, as_array
from modelexport.pytorch.perturbation import has_equal_values, perturbed
from modelexport.pytorch.traced import untouched
from modelexport.pytorch.values import run_arguments, tensors_in
from modelexport.runtime.sessions import input_names, open_session, run_session
from modelexport.tagged.file import TaggedFile
from modelexport.tagged.flattening import runnable
from modelexport.verify.differences import Difference, compare_outputs
from modelexport.verify.feeding import feeds
from modelexport.verify.matching import WHOLE_UNITS
from modelexport.verify.optimizers import blamed_optimizer
from modelexport.verify.others import run_others
from modelexport.verify.parameters import perturbable
from modelexport.verify.verdicts import OtherInputs
from modelexport.weights.sources import Weights

Inputs = Mapping[str, Any] | Sequence[Any]
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class WholeComparison:
    """The comparison of the file's outputs with the model's."""

    given: Mapping[str, Any]
    """The inputs of the file."""
    run: ModelRun
    """The PyTorch run that calls are compared with."""
    perturbed: Mapping[str, Any]
    """The weights of that run, if they are not the model's own."""
    outputs: list[Difference]
    others: list[OtherInputs]
    optimizer: str
    """The runtime's optimizer that causes the differences."""
    notes: list[str]


def compare_whole(
    model: nn.Module,
    inputs: Inputs,
    tagged: TaggedFile,
    weights: Weights | None,
    *,
    perturb: bool | None,
    others: bool,
    provider: str,
    tell: Tell,
) -> WholeComparison:
    """Run both and compare their outputs, on the inputs and on others."""
    notes: list[str] = []
    with runnable(tagged.path, tagged.encoding) as file:
        tell("verify: the file")
        session = open_session(file, provider=provider, optimized=True)
        given = feeds(inputs, session)
        if dropped := _dropped(inputs, input_names(session)):
            notes.append(f"the file does not take {', '.join(dropped)}: the exporter found no use of it")
        outputs = run_session(session, given)
        tell("verify: PyTorch")
        run, other_weights = _run_with_others(model, inputs, tagged, weights, perturb, notes)
        right = run_module(model, inputs, weights) if other_weights else run.outputs
        whole = _Outputs(
            right, run if not other_weights else None, lambda: run_observed(model, inputs, tagged, weights, {})
        )
        compared = whole.compare(outputs)
        optimizer = ""
        if any(one.status == "differ" for one in compared):
            tell("verify: the runtime's optimizer")
            optimizer = blamed_optimizer(file, given, whole.agrees, provider)
        more = []
        if others and weights is None:
            tell("verify: other inputs")
            more = run_others(inputs, tagged, session, lambda other: run_module(model, other))
        del session  # before its file is removed
    return WholeComparison(
        given=given,
        run=run,
        perturbed=other_weights,
        outputs=compared,
        others=more,
        optimizer=optimizer,
        notes=notes,
    )


def _run_with_others(
    model: nn.Module,
    inputs: Inputs,
    tagged: TaggedFile,
    weights: Weights | None,
    perturb: bool | None,
    notes: list[str],
) -> tuple[ModelRun, Mapping[str, Any]]:
    """A run with changed weights, and these; with the model's own if not requested or if outputs are not finite."""
    others = _other_weights(model, tagged, weights, perturb)
    run = run_observed(model, inputs, tagged, weights, others)
    if others and not _finite(run):
        notes.append("weights were not perturbed: with changed weights the outputs of the model are not finite")
        return run_observed(model, inputs, tagged, weights, {}), {}
    return run, others


def run_observed(
    model: nn.Module, inputs: Inputs, tagged: TaggedFile, weights: Weights | None, others: Mapping[str, Any]
) -> ModelRun:
    """A PyTorch run in which every call is recorded and, if possible, every operation.

    Args:
        others: The weights to use instead of the model's own.
    """
    called = {traced.call.path for traced in tagged.calls}
    never = {path for path, _ in model.named_modules()} - called
    # PyTorch compiles the branches of a condition, which is not possible while operations are recorded.
    operations = not any(nested_graphs(node) for node in tagged.model.graph)
    return ModelRun(model, inputs, weights, parameters=others, never_called=never, operations=operations)


@dataclass(frozen=True)
class _Outputs:
    """Outputs of a whole run, in which rounding adds up: it is measured if a few units are not enough."""

    right: Sequence[Any]
    run: ModelRun | None
    make: Callable[[], ModelRun]
    """Returns the float64 run, or ``None`` if there is none."""

    @cached_property
    def exact(self) -> Sequence[Any] | None:
        precise = (self.run or self.make()).in_float64(from_right_values=False)
        return None if precise is None else precise.outputs

    def compare(self, found: Mapping[str, Any]) -> list[Difference]:
        names, arrays = list(found), list(found.values())
        compared = compare_outputs(names, self.right, arrays)
        if all(one.status == "agree" for one in compared):
            return compared
        if self.exact is None:
            return compare_outputs(names, self.right, arrays, units=WHOLE_UNITS)
        return compare_outputs(names, self.right, arrays, self.exact)

    def agrees(self, found: Mapping[str, Any]) -> bool:
        return all(one.status == "agree" for one in self.compare(found))


def _other_weights(
    model: nn.Module, tagged: TaggedFile, weights: Weights | None, perturb: bool | None
) -> Mapping[str, Any]:
    if weights is not None or perturb is False:
        return {}
    keys = perturbable(tagged.model)
    if perturb is None and not has_equal_values(model, keys):
        return {}
    return perturbed(model, keys)


def _finite(run: ModelRun) -> bool:
    return all(np.isfinite(array.astype(np.float64)).all() for array in run.outputs if array.dtype.kind == "f")


def run_module(
    model: nn.Module, inputs: Inputs, weights: Weights | None = None, *, seed: int | None = None
) -> list[Any]:
    """The tensors in what a model returns, in order.

    Args:
        seed: The seed of the model's random numbers.
    """
    if weights is not None:
        raise UsageError("the model was built without weights and cannot run: give its weights")
    args, kwargs = run_arguments(inputs)
    with untouched(model), collected():
        if seed is not None:
            torch.manual_seed(seed)
        return [as_array(tensor) for _, tensor in tensors_in(model(*args, **kwargs))]


def _dropped(inputs: Inputs, wanted: Sequence[str]) -> list[str]:
    """The names of the given tensors that a file does not take."""
    given = [name for name, _ in tensors_in(inputs)]
    return (
        [] if len(given) <= len(wanted) else [n for n in given if n not in {w.removeprefix("input.") for w in wanted}]
    )

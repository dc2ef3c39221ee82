"""Compares the outputs of the whole model and its file on the same inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from modelexport.core.background import begun
from modelexport.core.messages import collected
from modelexport.core.text import plural
from modelexport.errors import UsageError
from modelexport.graph.nodes import nested_graphs
from modelexport.pytorch.model_run import ModelRun
from modelexport.pytorch.perturbation import entries_of, indistinct, perturbed, weak
from modelexport.pytorch.prepared import kept_tensors
from modelexport.pytorch.traced import untouched
from modelexport.pytorch.values import as_array, run_arguments, tensors_in
from modelexport.runtime.evidence import Evidence
from modelexport.runtime.fingerprints import is_floating
from modelexport.runtime.sessions import input_names, run_session
from modelexport.tagged.file import TaggedFile
from modelexport.tagged.flattening import runnable
from modelexport.verify.differences import Difference
from modelexport.verify.feeding import feeds
from modelexport.verify.kept import KeptRuns
from modelexport.verify.optimizers import blamed_optimizer
from modelexport.verify.others import Others, run_others
from modelexport.verify.parameters import merged_entries, perturbable, untraced_entries
from modelexport.verify.whole import WholeOutputs, open_as_run
from modelexport.weights.sources import Weights
from modelexport.weights.transforms import state_dict_of

Inputs = Mapping[str, Any] | Sequence[Any]
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class WholeComparison:
    """The comparison of the file's outputs with the model's."""

    given: Mapping[str, Any]
    """The inputs of the file."""
    run: Evidence
    """The PyTorch run that calls are compared with."""
    perturbed: Mapping[str, Any]
    """The weights of that run, if they are not the model's own."""
    outputs: list[Difference]
    others: Others
    optimizer: str
    """The runtime's optimizer that causes the differences."""
    notes: list[str]


@dataclass(frozen=True)
class ModelRuns:
    """The runs of a model that a verification of one of its files needs, each made once."""

    model: nn.Module
    tagged: TaggedFile
    weights: Weights | None
    kept: KeptRuns

    @cached_property
    def _facts(self) -> tuple[frozenset[str], bool]:
        return _facts(self.model, self.tagged)

    def observed(self, inputs: Inputs, others: Mapping[str, Any]) -> ModelRun:
        """A recorded run.

        Args:
            others: The weights to use instead of the model's own.
        """
        key = ("observed", _contents(inputs), frozenset(others), self._facts)
        return self.kept.get(key, lambda: run_observed(self.model, inputs, self.tagged, self.weights, others))

    def with_other_numbers(self, inputs: Inputs, others: Mapping[str, Any]) -> list[ModelRun]:
        """Recorded runs with other random numbers.

        Args:
            others: As in :meth:`observed`.
        """
        return [run_observed(self.model, inputs, self.tagged, None, others, seed=seed) for seed in _OTHER_SEEDS]

    def outputs(self, inputs: Inputs) -> list[Any]:
        """The outputs alone."""
        bodies = self._facts[1]
        return self.kept.get(
            ("outputs", _contents(inputs)),
            lambda: run_module(self.model, inputs, self.weights, guarded=True, bodies=bodies),
        )

    def plain_outputs(self, inputs: Inputs) -> list[Any]:
        """The outputs as people run the model, with PyTorch's fused operators: never kept."""
        return run_module(self.model, inputs, self.weights, guarded=True, as_exported=False)

    def outputs_with(self, inputs: Inputs, others: Mapping[str, Any]) -> list[Any]:
        """The outputs with other weights, and what hooks of the caller do: never kept.

        Args:
            others: The weights to use instead of the model's own.
        """
        bodies = self._facts[1]
        return run_module(self.model, inputs, self.weights, parameters=others, guarded=True, bodies=bodies)


_OTHER_SEEDS = (20_113, 20_117, 20_129)


def _contents(inputs: Inputs) -> tuple[object, ...]:
    """What tells inputs apart: the variations depend on the file, too."""
    arrays = [(name, as_array(tensor)) for name, tensor in tensors_in(inputs)]
    return tuple((name, str(array.dtype), array.shape, hash(array.tobytes())) for name, array in arrays)


def compare_whole(
    runs: ModelRuns,
    inputs: Inputs,
    constants: Collection[str],
    *,
    perturb: bool | None,
    others: bool,
    provider: str,
    tell: Tell,
) -> WholeComparison:
    """Run both and compare their outputs, on the inputs and on others.

    Args:
        constants: Arguments that the file does not take because it has their values.
    """
    tagged, notes = runs.tagged, list[str]()
    with runnable(tagged.path, tagged.encoding) as file:
        tell("verify: the file and PyTorch")
        opening = begun(lambda: open_as_run(file, provider))
        try:
            run, other_weights = _run_with_others(runs, inputs, perturb, notes)
            returned = runs.outputs(inputs) if other_weights else run.outputs
        except Exception:
            feeds(inputs, opening.result()[0])  # what is wrong with the file, or with its inputs, says more
            raise
        finally:
            wait([opening])  # the file may be removed after this block
        session, told = opening.result()
        notes += [told] if told else []
        given = feeds(inputs, session)
        if dropped := [name for name in _dropped(inputs, input_names(session)) if name not in constants]:
            notes.append(f"the file does not take {', '.join(dropped)}: the exporter found no use of it")
        outputs = run_session(session, given)
        whole = WholeOutputs(returned, tagged.model, lambda: runs.observed(inputs, {}))
        if missing := len(returned) - len(whole.right):
            notes.append(f"{plural(missing, 'output')} of the model left out at export")
        compared = whole.compare_with_ties(outputs, tagged, given, provider)
        if zero := [one.name for one, right in zip(compared, whole.right, strict=False) if _is_zero(right)]:
            notes.append(f"{', '.join(zero)} is zero everywhere with these inputs: little of what computes it shows")
        if lost := [one.name for one, right in zip(compared, whole.right, strict=False) if _has_no_numbers(right)]:
            notes.append(f"{', '.join(lost)} has no finite number with these inputs: nothing of what computes it shows")
        optimizer = ""
        if any(one.status == "differ" for one in compared) and not session.narrow:
            tell("verify: the runtime's optimizer")
            optimizer = blamed_optimizer(file, given, whole.agrees, provider)
            if not optimizer and (exact := whole.compare_with_kernels(tagged, given, provider)):
                compared = exact
                notes.append(f"outputs were compared {exact[0].reason}")
        more = Others([], {}, [])
        if others and runs.weights is None:
            tell("verify: other inputs")
            more = run_others(
                inputs,
                tagged,
                session,
                runs.outputs,
                runs.plain_outputs,
                lambda other: runs.observed(other, {}),
                provider,
                kept_tensors(runs.model, inputs, constants),
            )
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
    runs: ModelRuns, inputs: Inputs, perturb: bool | None, notes: list[str]
) -> tuple[ModelRun, Mapping[str, Any]]:
    """A run with changed weights, and these; with the model's own if that is not asked for or gives no numbers."""
    others = _other_weights(runs.model, runs.tagged, runs.weights, perturb, notes)
    if not others:
        return runs.observed(inputs, {}), {}
    try:
        run = runs.observed(inputs, others)
        if _finite(run):
            return run, others
        refused = "the outputs of the model are not finite"
    except Exception as error:  # a model may check its weights; with its own, the next run says whether it runs
        refused = f"the model does not run ({type(error).__name__})"
    notes.append(f"weights were not perturbed: with changed weights {refused}")
    return runs.observed(inputs, {}), {}


def run_observed(
    model: nn.Module,
    inputs: Inputs,
    tagged: TaggedFile,
    weights: Weights | None,
    others: Mapping[str, Any],
    *,
    seed: int | None = None,
    operations: bool = True,
) -> ModelRun:
    """A PyTorch run in which every call is recorded and, if possible, every operation.

    Args:
        others: The weights to use instead of the model's own.
        seed: The seed of the model's random numbers.
        operations: Whether to record operations.
    """
    never, compiles = _facts(model, tagged)
    return ModelRun(
        model,
        inputs,
        weights,
        parameters=others,
        never_called=never,
        operations=operations,
        seed=seed,
        bodies=compiles,
    )


def _facts(model: nn.Module, tagged: TaggedFile) -> tuple[frozenset[str], bool]:
    """The modules that are never called, and whether the model may have branches or loops, which PyTorch compiles."""
    called = {traced.call.path for traced in tagged.calls}
    never = {path for path, _ in model.named_modules()} - called
    return frozenset(never), any(nested_graphs(node) for node in tagged.model.graph)


def _other_weights(
    model: nn.Module, tagged: TaggedFile, weights: Weights | None, perturb: bool | None, notes: list[str]
) -> Mapping[str, Any]:
    if weights is not None or perturb is False:
        return {}
    keys = perturbable(tagged.model)
    if perturb is None:
        equal = indistinct(model, keys)
        if not equal:
            return {}
        keys = equal | weak(model, keys)
        if _sized_by_values(tagged.model):
            notes.append("weights were not perturbed: the sizes of the model's outputs depend on what it computes")
            return {}
        if folded := _folded(model, tagged):
            more = f" and {len(folded) - 1} others" if len(folded) > 1 else ""
            notes.append(f"weights were not perturbed: another tool folded or merged {folded[0]}{more}")
            return {}
    return perturbed(model, keys)


def _sized_by_values(model: ir.Model) -> bool:
    """Whether an output has sizes that are not those of the inputs: with other weights it may be any number larger."""
    given = {str(size) for value in model.graph.inputs for size in value.shape or () if not isinstance(size, int)}
    sizes = [size for value in model.graph.outputs for size in value.shape or () if not isinstance(size, int)]
    unknown = [set(re.findall(r"[A-Za-z_]\w*", str(size.value))) - given for size in sizes if size.value is not None]
    return any(unknown) or (not given and any(size.value is None for size in sizes))


def _folded(model: nn.Module, tagged: TaggedFile) -> list[str]:
    """The entries that cannot be given other values in the file, because it no longer has them as they are."""
    tensors = entries_of(model)

    def is_tied(one: str, other: str) -> bool:
        return one in tensors and other in tensors and tensors[one].data_ptr() == tensors[other].data_ptr()

    used = {key for key, entry in state_dict_of(tagged.model).items() if entry.used}
    return sorted((untraced_entries(tagged.model) | merged_entries(tagged.model, is_tied)) & used)


def _is_zero(array: Any) -> bool:
    return bool(is_floating(array) and array.size and not array.any())


def _finite(run: ModelRun) -> bool:
    return all(np.isfinite(array.astype(np.float64)).all() for array in run.outputs if is_floating(array))


def run_module(
    model: nn.Module,
    inputs: Inputs,
    weights: Weights | None = None,
    *,
    parameters: Mapping[str, Any] | None = None,
    seed: int | None = None,
    guarded: bool = False,
    bodies: bool = False,
    as_exported: bool = True,
) -> list[Any]:
    """The tensors in what a model returns, in order.

    Args:
        parameters: Other values for some ``state_dict`` entries, for this run.
        seed: The seed of the model's random numbers.
        guarded: The model compiles nothing, so that its writes to parameters can be watched in every operation.
        bodies: Nor its branches and loops, which run as Python.
        as_exported: The model computes as a front end sees it, with masks that hide nothing and no fused operators.
    """
    if weights is not None:
        raise UsageError("the model was built without weights and cannot run: give its weights")
    args, kwargs = run_arguments(inputs)
    with untouched(model, masks=as_exported, guarded=guarded, bodies=bodies), collected():
        if seed is not None:
            torch.manual_seed(seed)
        entries = entries_of(model) if parameters else {}
        for key, tensor in (parameters or {}).items():
            entries[key].data = tensor
        return [as_array(tensor) for _, tensor in tensors_in(model(*args, **kwargs))]


def _has_no_numbers(array: Any) -> bool:
    return is_floating(array) and bool(array.size) and not np.isfinite(array).any()


def _dropped(inputs: Inputs, wanted: Sequence[str]) -> list[str]:
    """The names of the given tensors that a file does not take."""
    given = [name for name, _ in tensors_in(inputs)]
    return (
        [] if len(given) <= len(wanted) else [n for n in given if n not in {w.removeprefix("input.") for w in wanted}]
    )

"""A model and its file: what runs and compares them on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from modelexport.core.collected_messages import collected
from modelexport.errors import UsageError
from modelexport.files.linked_weights import check_weights_files
from modelexport.files.path_or_model import Source
from modelexport.format.keys import ADOPTED
from modelexport.graph.kept_outputs import exposed_outputs, requested_outputs
from modelexport.graph.nodes import nested_graphs, required_inputs
from modelexport.graph.parameter_plans import state_dict_of
from modelexport.graph.properties import recorded
from modelexport.pytorch.calls.module_tree_of_model import module_tree
from modelexport.pytorch.calls.traced_tree import ModelState
from modelexport.pytorch.inputs.named_inputs import under_names
from modelexport.pytorch.nested_tensors import Inputs, as_array, as_stored, tensors_in
from modelexport.pytorch.perturbed_weights import entries_of
from modelexport.pytorch.runs.float64_kernels import DOUBLE_KERNELS
from modelexport.pytorch.runs.model_trace import own_type, trace_model
from modelexport.pytorch.runs.outputs_as_users_run import returned_by
from modelexport.runtime.devices import CPU
from modelexport.tagged.file import TaggedFile, as_tagged
from modelexport.traces.array_differences import is_floating, relative_error
from modelexport.traces.file_run import FileRun
from modelexport.traces.file_trace import computed_weights, rounded_constants
from modelexport.traces.node_computation import NodeError
from modelexport.traces.outputs_of_two_files import narrowest_type
from modelexport.traces.tolerances import ALLOWED, EQUAL_IN_FLOAT64, TIMES_ALLOWED, TIMES_ONE_BIT
from modelexport.traces.trace import Index, Trace
from modelexport.verify.calls_by_value import find_parameters, with_calls_of_model
from modelexport.verify.compared_runs import Compared, compare_runs, outputs_of
from modelexport.verify.cut_out_calls import arguments_of_cut, array_of, refuse_stage, results_of_cut
from modelexport.verify.onnxruntime_outputs import AsRun, compare_as_run
from modelexport.verify.parameter_comparison import check_same_entries
from modelexport.weights.bytes_of_entries import Weights

T = TypeVar("T")


def open_for(model: nn.Module, path: Source | TaggedFile) -> TaggedFile:
    """The file at a path, or one that was read.

    Calls and parameters of a file without tags are found by value; of one that ``adopt`` tagged, too, unless its
    parameters and classes of calls are those of the model.

    Raises:
        FileFormatError: It is not an ONNX file, or its weights files have changed.
        UsageError: It has tags, and is not a file of this model, or it is a stage of one.
    """
    tagged = as_tagged(path)
    refuse_stage(tagged.path, "the file that was split")
    tensors = entries_of(model)
    entries = {k: (str(t.dtype).removeprefix("torch."), list(t.shape)) for k, t in tensors.items()}
    known = {key: (entry.dtype, entry.shape) for key, entry in state_dict_of(tagged.model).items()}
    classes = {path: type(module).__name__ for path, module in model.named_modules(remove_duplicate=False)}
    alike = known == entries and all(tagged.class_of(t.call) == classes.get(t.call.path) for t in tagged.calls)
    by_value = tagged.found_calls is not None or (bool(recorded(tagged.model, ADOPTED)) and not alike)
    if not by_value:
        check_same_entries(entries, tagged.model, tagged.path)
    check_weights_files(tagged.model)
    if by_value:
        within = tagged.top.path
        find_parameters(tagged.model, entries, lambda key: as_array(as_stored(tensors[key])), within=within)
    return replace(tagged, by_value=by_value)


class ModelRuns:
    """Runs of a model, each made once.

    Args:
        weights: The places of the weights of a model that was built without them; each module gets its own as it runs.
    """

    def __init__(self, model: nn.Module, weights: Weights | None = None) -> None:
        self.model, self.weights = model, weights
        self._made: dict[Hashable, Any] = {}

    @cached_property
    def _state(self) -> ModelState:
        return ModelState(self.model)

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def trace(
        self, inputs: Inputs, changed: Mapping[str, torch.Tensor], wide: bool, how: Callable[[], dict[str, Any]]
    ) -> Trace:
        """A run of which every value is recorded, in float64 or in the model's own types.

        Args:
            changed: Weights to use instead of the model's own.
            how: Gives more arguments of :func:`trace_model`, which are the same for all files.
        """
        run = partial(trace_model, self.model, inputs, parameters=changed, weights=self.weights, wide=wide)
        return self._once(_key_of_trace(inputs, changed, wide), lambda: run(**how()))

    def outputs(self, inputs: Inputs, wide: bool) -> Trace:
        """A run whose outputs are recorded; if there is one whose values are recorded, that one."""
        whole: Trace | None = self._made.get(_key_of_trace(inputs, {}, wide))
        run = partial(trace_model, self.model, inputs, weights=self.weights, calls=False, wide=wide)
        return whole or self._once(("outputs", _contents(inputs), wide), run)

    @property
    def in_float64(self) -> bool:
        """Whether all runs that were to be in float64 were. Models whose code checks types do not run there."""
        wide = [run for key, run in self._made.items() if isinstance(key, tuple) and key[-1] is True]
        return all(run.is_float64 for run in wide)

    def own(self, inputs: Inputs) -> list[Any]:
        """The outputs of the model in its own types."""
        return self._once(("own", _contents(inputs)), lambda: returned_by(self.model, inputs, state=self._state))

    def note_on_fused(self, inputs: Inputs) -> list[str]:
        """A note if users of the model get other results: PyTorch's fused operators, which run only without hooks, give
        zeros where a padding mask hides tokens.
        """
        stepwise, fused = self.own(inputs), returned_by(self.model, inputs, as_exported=False)
        apart = [relative_error(*both) for both in zip(stepwise, fused, strict=False)]
        allowed = [ALLOWED.get(str(array.dtype), 0.0) for array in stepwise]
        worst = max((error for error, most in zip(apart, allowed, strict=False) if error > most), default=0.0)
        if not worst or len(stepwise) != len(fused):
            return []
        return [
            f"as users run it, PyTorch returns something else, off by {worst:.1e} of its size: with its fused "
            "operators, torch.autocast, or without a mask that hides nothing; the file computes what its single "
            "steps compute in the types of the weights"
        ]


@dataclass(frozen=True)
class ModelAndFile:
    """A model and its file. Immutable: a method that finds out more about them returns a new one."""

    runs: ModelRuns
    tagged: TaggedFile
    dtype: str
    """The widest floating-point type of the model."""
    own_types: str = ""
    """Why the model runs in its own types instead of float64; empty if it runs in float64."""

    @classmethod
    def of(cls, runs: ModelRuns, inputs: Inputs, tagged: TaggedFile) -> ModelAndFile:
        """A model, with its runs, and its file."""
        return cls(runs, tagged, str(own_type(runs.model, inputs)).removeprefix("torch."))

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.runs.model

    @property
    def wide(self) -> bool:
        """Whether both run in float64. They do not if the model computes something else there."""
        return not self.own_types

    @property
    def notes(self) -> list[str]:
        """Notes on the comparison, one line each."""
        by_value = ["the calls of the file and its parameters were found by value"] if self.tagged.by_value else []
        less = "calls were compared with its run in its own types, with less precision"
        return by_value + ([f"{self.own_types}: {less}"] if self.own_types else [])

    @cached_property
    def run(self) -> FileRun:
        """The file in float64, or in its own types if the model is."""
        return FileRun(self.tagged.model, in_float64_for=self.dtype if self.wide else None, kernels=DOUBLE_KERNELS)

    def trace(self, inputs: Inputs, changed: Mapping[str, torch.Tensor], *, as_it_runs: bool = False) -> Trace:
        """A run of the model in float64.

        Args:
            changed: Weights to use instead of the model's own.
            as_it_runs: In its own types instead.
        """
        return self.runs.trace(inputs, changed, self.wide and not as_it_runs, self._recorded)

    def _recorded(self) -> dict[str, Any]:
        """The keywords of :func:`trace_model` that depend on the file."""
        paths = {path for path, _ in self.model.named_modules()}
        called = {traced.call.path for traced in self.tagged.calls} if not self.tagged.by_value else paths
        bodies = self.tagged.cut is not None or any(nested_graphs(node) for node in self.tagged.model.graph)
        return {"never_called": paths - called, "bodies": bodies, "kept": rounded_constants(self.run)}

    def returned(self, inputs: Inputs) -> list[Any]:
        """What the model, or the call that was cut out, returns in float64."""
        if self.tagged.cut is not None:
            return self._results(self.trace(inputs, {}))
        return self.runs.outputs(inputs, self.wide).outputs

    def _results(self, reference: Trace) -> list[Any]:
        """What the outputs of a call that was cut out should be."""
        return [array_of(tensor) for _, tensor in outputs_of(self.tagged, reference)]

    def compared(self, inputs: Inputs, changed: Mapping[str, torch.Tensor]) -> tuple[ModelAndFile, Compared]:
        """Runs of both on the same inputs, compared, and the types in which they are.

        A model may keep tensors that an earlier run computed in its own types, such as a table of angles. If it differs
        from the file in float64, and the file has no such constants, they are compared in these types.
        """
        reference = self.trace(inputs, changed)
        own_trace = partial(self.trace, inputs, changed, as_it_runs=True) if reference.is_float64 else None
        compared = compare_runs(
            self.tagged, self.run, self.feeds(inputs, reference), reference, self._weights(changed), own_trace
        )
        if compared.agrees or not self.wide or not self._keeps_results(reference):
            return self, compared
        return replace(self, own_types=_KEPT).compared(inputs, changed)

    def _keeps_results(self, reference: Trace) -> bool:
        """Whether a run in float64 used tensors of earlier runs that are not constants of the file."""
        constants = Index()
        for _, stored in self.run.constants() if reference.kept_before else ():
            constants.add(stored())
        return any(not constants.equal_in_any_order(tensor) for tensor in reference.kept_before)

    def with_calls_by_value(self, inputs: Inputs, changed: Mapping[str, torch.Tensor]) -> ModelAndFile:
        """The same with the calls of the model in a file without tags, by the values that both compute."""
        pair, compared = self.compared(inputs, changed)
        return replace(pair, tagged=with_calls_of_model(self.tagged, module_tree(self.model), compared.per_module))

    def agrees(self, inputs: Inputs, right: Sequence[Any]) -> bool:
        """Whether the file gives what the model returns in float64, in one run of which nothing is recorded."""
        model = self.tagged.model
        expected, exposed = requested_outputs(model, right), exposed_outputs(model)
        try:
            results = self.run.run(self.feeds(inputs), constants=self._weights({}))
        except NodeError:
            return False
        arrays = [array for name, array in results.items() if name not in exposed]
        return len(arrays) == len(expected) and all(
            relative_error(first, second) <= EQUAL_IN_FLOAT64 for first, second in zip(expected, arrays, strict=True)
        )

    def agrees_alone(self, inputs: Inputs) -> bool:
        """Whether every call of the file agrees, for a file that ONNX Runtime does not run."""
        return self.settled(inputs).compared(inputs, {})[1].agrees

    def fault_beside_nan(self, inputs: Inputs, right: Sequence[Any]) -> str:
        """How ONNX Runtime differs where the model returns NaN: its mean of an empty tensor is another number.

        Args:
            right: What the model returns in float64.

        Returns:
            A phrase; empty if it returns NaN, too, or if the model returns none.
        """
        if not any(array.dtype.kind == "f" and np.isnan(array).any() for array in right):
            return ""
        try:
            agrees = all(output.status != "differ" for output in self.as_run(inputs, CPU, right).outputs)
        except UsageError as error:
            return f"PyTorch returns NaN, and {error}"
        return "" if agrees else "PyTorch returns NaN, as for the mean of nothing, and ONNX Runtime does not"

    def accepts(self, inputs: Inputs) -> bool:
        """Whether the model runs: in its own types, in which it refuses sizes sooner than in float64."""
        try:
            with collected():
                self.runs.own(inputs)
        except Exception:  # a model may raise anything for sizes that it does not accept
            return False
        return True

    def feeds(self, inputs: Inputs, reference: Trace | None = None) -> Mapping[str, Any]:
        """The inputs under the names of the file's.

        Args:
            reference: The run whose values the inputs of a call that was cut out are; by default one in its own types.
        """
        if self.tagged.cut is not None:
            return arguments_of_cut(self.tagged, self.tagged.cut, reference or self.trace(inputs, {}, as_it_runs=True))
        return under_names(inputs, [value.name or "" for value in required_inputs(self.tagged.model)])

    def _weights(self, changed: Mapping[str, torch.Tensor]) -> Mapping[ir.Value, Any]:
        weights = self.runs.weights
        entries = {**entries_of(self.model), **changed} if weights is None else {}

        def read(key: str) -> Any:
            return self.run.widened(as_array(entries[key]) if weights is None else weights.tensors[key].numpy())

        return computed_weights(self.run, read, changed, exact=self.runs.in_float64)

    def settled(self, inputs: Inputs) -> ModelAndFile:
        """Compares in the model's own types instead if the model computes something else in float64 than rounding
        explains.

        A model whose code asks for the type of its tensors may. Where both results are far apart, a run with the last
        bit of each number changed shows what rounding does to the result. If the file agrees with both runs except for
        a choice among equal scores, PyTorch only chose other elements in float64.
        """
        exact = self.runs.outputs(inputs, self.wide)
        if exact.draws_numbers:  # other numbers are drawn in float64
            return self
        own_results = self.runs.own(inputs)
        apart = [
            relative_error(array, right) if is_floating(array) else 0.0
            for right, array in zip(exact.outputs, own_results, strict=False)
        ]
        narrowest = narrowest_type(self.tagged.model)
        if all(error <= TIMES_ALLOWED * ALLOWED.get(narrowest, 0.0) for error in apart):
            return self
        nudged = returned_by(self.model, inputs, nudged=True)
        rounding = [relative_error(array, other) for array, other in zip(own_results, nudged, strict=False)]
        if not any(error > TIMES_ONE_BIT * most for error, most in zip(apart, rounding, strict=False)):
            return self
        in_own_types = replace(self, own_types="in float64 the model computes something else")
        if not (wide := self.compared(inputs, {})[1]).agrees:
            return in_own_types
        own = in_own_types.compared(inputs, {})[1]
        chose = own.agrees and (wide.end_to_end.trace.ties or own.end_to_end.trace.ties)
        return self if chose else in_own_types

    def as_run(
        self, inputs: Inputs, provider: str, exact: Sequence[Any], ran: Mapping[str, Any] | None = None
    ) -> AsRun:
        """The outputs in ONNX Runtime.

        Args:
            exact: What the model returns in float64.
            ran: What the file computes there, if it was run before.
        """
        own_results, model = self.runs.own(inputs), self.tagged.model
        own_results, exact = (requested_outputs(model, each_result) for each_result in (own_results, exact))
        exposed = exposed_outputs(model)
        if self.tagged.cut is not None:
            own_results = self._results(self.trace(inputs, {}, as_it_runs=True))
            results = results_of_cut(self.tagged, self.tagged.cut, self.trace(inputs, {}))
            exposed = [value.name or "" for value in self.tagged.model.graph.outputs if value not in results]
        return compare_as_run(
            self.tagged, self.feeds(inputs), own_results, exact, provider=provider, exposed=exposed, ran=ran
        )


_KEPT = "the model keeps tensors that an earlier run computed in its own types"


def _key_of_trace(inputs: Inputs, changed: Mapping[str, torch.Tensor], wide: bool) -> Hashable:
    return "trace", _contents(inputs), frozenset(changed), wide


def _contents(inputs: Inputs) -> tuple[object, ...]:
    """A hashable key of inputs: names, types, shapes, and the hash of the elements."""
    arrays = [(name, as_array(tensor)) for name, tensor in tensors_in(inputs)]
    return tuple((name, str(array.dtype), array.shape, hash(array.tobytes())) for name, array in arrays)

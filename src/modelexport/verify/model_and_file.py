"""A model and its file: what runs and compares them on the same inputs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from modelexport.files.linked_weights import check_weights_files
from modelexport.files.path_or_model import Source
from modelexport.format.keys import ADOPTED
from modelexport.graph.kept_outputs import exposed_outputs, requested_outputs
from modelexport.graph.nodes import nested_graphs, required_inputs
from modelexport.graph.parameter_plans import state_dict_of
from modelexport.graph.properties import recorded
from modelexport.pytorch.calls.module_tree_of_model import module_tree
from modelexport.pytorch.inputs.named_inputs import under_names
from modelexport.pytorch.nested_tensors import Inputs, as_array, as_stored, tensors_in
from modelexport.pytorch.perturbed_weights import entries_of
from modelexport.pytorch.runs.float64_kernels import DOUBLE_KERNELS
from modelexport.pytorch.runs.model_trace import own_type, trace_model
from modelexport.pytorch.runs.outputs_as_users_run import returned_by
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tagged.strip_and_inline import runnable
from modelexport.traces.array_differences import is_floating, relative_error
from modelexport.traces.file_run import FileRun
from modelexport.traces.file_trace import computed_weights, rounded_constants
from modelexport.traces.node_computation import NodeError
from modelexport.traces.outputs_of_two_files import narrowest_type
from modelexport.traces.tolerances import ALLOWED, EQUAL_IN_FLOAT64, TIMES_ALLOWED, TIMES_ONE_BIT
from modelexport.traces.trace import Index, Trace
from modelexport.verify.calls_by_value import find_parameters, with_calls_of
from modelexport.verify.compared_runs import Compared, compare_runs, outputs_of
from modelexport.verify.cut_out_calls import arguments_of_cut, array_of, refuse_stage, results_of_cut
from modelexport.verify.onnxruntime_outputs import AsRun, compare_as_run
from modelexport.verify.parameter_comparison import check_same_entries
from modelexport.weights.bytes_of_entries import Weights


def open_for(model: nn.Module, path: Source) -> TaggedFile:
    """The file at a path.

    The calls and parameters of another exporter's file are found by value, also in what a command made of one, if names
    of parameters or classes of calls are not the model's.

    Raises:
        FileFormatError: It is not an ONNX file, or its weights files have changed.
        UsageError: It has tags, and is not a file of this model, or it is a stage of one.
    """
    tagged = read_tagged(path)
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


@dataclass
class Sides:
    """A model and its file."""

    model: nn.Module
    tagged: TaggedFile
    dtype: str
    """The widest floating-point type of the model."""
    weights: Weights | None = None
    kept: dict[Hashable, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    wide: bool = True
    """Whether the model runs in float64: not if it computes something else there."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        inputs: Inputs,
        tagged: TaggedFile,
        weights: Weights | None = None,
        kept: dict[Hashable, Any] | None = None,
    ) -> Sides:
        """A model and its file.

        Args:
            weights: As in :func:`modelexport.verify`.
            kept: As in :func:`modelexport.verify`.
        """
        dtype = str(own_type(model, inputs)).removeprefix("torch.")
        return cls(model, tagged, dtype, weights, {} if kept is None else kept)

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
        wide = self.wide and not as_it_runs
        key = _key_of_trace(inputs, changed, wide)
        if key not in self.kept:
            paths = {path for path, _ in self.model.named_modules()}
            called = {traced.call.path for traced in self.tagged.calls} if not self.tagged.by_value else paths
            self.kept[key] = trace_model(
                self.model,
                inputs,
                parameters=changed,
                weights=self.weights,
                never_called=paths - called,
                bodies=self.tagged.cut is not None or any(nested_graphs(node) for node in self.tagged.model.graph),
                wide=wide,
                kept=rounded_constants(self.run),
            )
        trace: Trace = self.kept[key]
        return trace

    def returned(self, inputs: Inputs) -> list[Any]:
        """What the model, or the call that was cut out, returns in float64."""
        if self.tagged.cut is not None:
            return self._results(self.trace(inputs, {}))
        return self._plain(inputs).outputs

    def _results(self, reference: Trace) -> list[Any]:
        """What the outputs of a call that was cut out should be."""
        return [array_of(tensor) for _, tensor in outputs_of(self.tagged, reference)]

    def _plain(self, inputs: Inputs) -> Trace:
        """A run of the model in float64 of which only the outputs are recorded, unless there is one of more."""
        key = ("returned", _contents(inputs), self.wide)
        if key not in self.kept:
            whole = self.kept.get(_key_of_trace(inputs, {}, self.wide))
            self.kept[key] = whole or trace_model(self.model, inputs, weights=self.weights, calls=False, wide=self.wide)
        plain: Trace = self.kept[key]
        return plain

    def compare(self, inputs: Inputs, changed: Mapping[str, torch.Tensor], reference: Trace | None = None) -> Compared:
        """Runs of both on the same inputs, compared.

        A model may keep tensors that an earlier run computed in its own types, such as a table of angles. If it differs
        from the file in float64, and the file has no such constants, they are compared in these types.
        """
        reference = reference or self.trace(inputs, changed)
        own_trace = partial(self.trace, inputs, changed, as_it_runs=True) if reference.is_float64 else None
        compared = compare_runs(
            self.tagged, self.run, self.feeds(inputs, reference), reference, self._weights(changed), own_trace
        )
        if compared.agrees or not self.wide or not self._keeps_results(reference):
            return compared
        self._compare_in_own_types(_KEPT)
        return self.compare(inputs, changed)

    def _keeps_results(self, reference: Trace) -> bool:
        """Whether a run in float64 used tensors from before it that are not constants of the file."""
        constants = Index()
        for _, stored in self.run.constants() if reference.kept_before else ():
            constants.add(stored())
        return any(not constants.equal_in_any_order(tensor) for tensor in reference.kept_before)

    def _compare_in_own_types(self, why: str) -> None:
        self.wide = False
        vars(self).pop("run", None)
        self.notes.append(f"{why}: calls were compared with its run in its own types, with less precision")

    def find_calls_by_value(self, inputs: Inputs, changed: Mapping[str, torch.Tensor]) -> None:
        """Give a file without tags the calls of the model, by the values that both compute."""
        compared = self.compare(inputs, changed)
        self.tagged = with_calls_of(self.tagged, module_tree(self.model), compared.per_module)

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

    def feeds(self, inputs: Inputs, reference: Trace | None = None) -> Mapping[str, Any]:
        """The inputs under the names of the file's.

        Args:
            reference: The run whose values the inputs of a call that was cut out are; by default one in its own types.
        """
        if self.tagged.cut is not None:
            return arguments_of_cut(self.tagged, self.tagged.cut, reference or self.trace(inputs, {}, as_it_runs=True))
        return under_names(inputs, [value.name or "" for value in required_inputs(self.tagged.model)])

    def _weights(self, changed: Mapping[str, torch.Tensor]) -> Mapping[ir.Value, Any]:
        entries = {**entries_of(self.model), **changed} if self.weights is None else {}

        def read(key: str) -> Any:
            return self.run.widened(
                as_array(entries[key]) if self.weights is None else self.weights.tensors[key].numpy()
            )

        return computed_weights(self.run, read, changed)

    def settle(self, inputs: Inputs) -> None:
        """Find out whether what the model computes in float64 is what it computes in its own types, but for rounding.

        A model that asks for the type of its tensors may not. Where much is between the two, the last bit of each
        weight is changed, to see what rounding makes of the result.
        """
        plain = self._plain(inputs)
        if plain.draws_numbers:  # other numbers are drawn in float64
            return
        own_results, exact = self.own(inputs), plain.outputs
        apart = [
            relative_error(array, right) if is_floating(array) else 0.0
            for right, array in zip(exact, own_results, strict=False)
        ]
        narrowest = narrowest_type(self.tagged.model)
        if all(error <= TIMES_ALLOWED * ALLOWED.get(narrowest, 0.0) for error in apart):
            return
        nudged = returned_by(self.model, inputs, nudged=True)
        rounding = [relative_error(array, other) for array, other in zip(own_results, nudged, strict=False)]
        if any(error > TIMES_ONE_BIT * most for error, most in zip(apart, rounding, strict=False)):
            self._compare_in_own_types("in float64 the model computes something else")

    def own(self, inputs: Inputs) -> list[Any]:
        """What the model returns in its own types."""
        key = ("own", _contents(inputs))
        if key not in self.kept:
            self.kept[key] = returned_by(self.model, inputs)
            self._note_fused(inputs, self.kept[key])
        results: list[Any] = self.kept[key]
        return results

    def as_run(
        self, inputs: Inputs, provider: str, exact: Sequence[Any], ran: Mapping[str, Any] | None = None
    ) -> AsRun:
        """The outputs in ONNX Runtime.

        Args:
            exact: What the model returns in float64.
            ran: What the file computes there, if it was run before.
        """
        own_results, model = self.own(inputs), self.tagged.model
        own_results, exact = (requested_outputs(model, each_result) for each_result in (own_results, exact))
        exposed = exposed_outputs(model)
        if self.tagged.cut is not None:
            own_results = self._results(self.trace(inputs, {}, as_it_runs=True))
            results = results_of_cut(self.tagged, self.tagged.cut, self.trace(inputs, {}))
            exposed = [value.name or "" for value in self.tagged.model.graph.outputs if value not in results]
        with runnable(self.tagged.path, self.tagged.encoding) as file:
            return compare_as_run(
                file,
                self.feeds(inputs),
                own_results,
                exact,
                narrowest=narrowest_type(self.tagged.model),
                provider=provider,
                exposed=exposed,
                ran=ran,
            )

    def _note_fused(self, inputs: Inputs, stepwise: Sequence[Any]) -> None:
        """Note what users of the model get otherwise: a fused operator of PyTorch, which is used only without hooks,
        gives zeros where a padding mask hides tokens.
        """
        fused = returned_by(self.model, inputs, as_exported=False)
        apart = [relative_error(*both) for both in zip(stepwise, fused, strict=False)]
        allowed = [ALLOWED.get(str(array.dtype), 0.0) for array in stepwise]
        worst = max((error for error, most in zip(apart, allowed, strict=False) if error > most), default=0.0)
        if worst and len(stepwise) == len(fused):
            self.notes.append(
                f"as users run it, PyTorch returns something else, off by {worst:.1e} of its size: with its fused "
                "operators, torch.autocast, or without a mask that hides nothing; the file computes what its single "
                "steps compute in the types of the weights"
            )


_KEPT = "the model keeps tensors that an earlier run computed in its own types"


def _key_of_trace(inputs: Inputs, changed: Mapping[str, torch.Tensor], wide: bool) -> Hashable:
    return "trace", _contents(inputs), frozenset(changed), wide


def _contents(inputs: Inputs) -> tuple[object, ...]:
    """What tells inputs apart."""
    arrays = [(name, as_array(tensor)) for name, tensor in tensors_in(inputs)]
    return tuple((name, str(array.dtype), array.shape, hash(array.tobytes())) for name, array in arrays)

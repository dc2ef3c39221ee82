"""The trace of a file: what each of its values is in a run, next to what PyTorch computed.

A right file cannot repeat PyTorch's random numbers and its choice among equal scores, so it gets those of PyTorch's
run. Values can be replaced by others, so that what comes after a wrong one is computed from the right one.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.format.dtypes import dtype_name
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import draws
from modelexport.graph.operator_kinds import SELECTS_ELEMENTS
from modelexport.graph.parameter_plans import parameter_plan
from modelexport.traces.array_differences import relative_error
from modelexport.traces.exact_transforms import exact_step
from modelexport.traces.file_run import Change, FileRun
from modelexport.traces.fingerprints import Fingerprint, fingerprint_of
from modelexport.traces.node_computation import NodeError, nudge
from modelexport.traces.tied_indices import is_tie
from modelexport.traces.tolerances import COMPUTED_WEIGHTS, SCORES_OF_PYTORCH, SMALLEST_NORMAL_FLOAT16, UNITS
from modelexport.traces.trace import Content, Index, Trace
from modelexport.weights.recorded_transforms import compute_planned, run_step


@dataclass(eq=False)
class FileTrace:
    """The values of a file, as fingerprints, from one run."""

    prints: dict[ir.Value, list[Fingerprint]] = field(default_factory=lambda: defaultdict(list))
    """Every value of the run, inputs included; those in loops once for each iteration."""
    shapes: dict[ir.Value, tuple[int, ...]] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    ties: dict[ir.Node, None] = field(default_factory=dict)
    """The nodes that chose other elements of equal scores than PyTorch, and got PyTorch's choice."""
    random: set[ir.Value] = field(default_factory=set)
    """Values that depend on random numbers which are not PyTorch's."""
    replaced: dict[ir.Value, float] = field(default_factory=dict)
    """Values that were replaced, to how far off they were: the norm of the difference over that of the right value."""
    failed: NodeError | None = None
    """The node at which the run ended."""


def trace_file(
    run: FileRun,
    inputs: Mapping[str, Any],
    reference: Trace,
    *,
    replace: Mapping[ir.Value, Any] | None = None,
    constants: Mapping[ir.Value, Any] | None = None,
    change: Change = lambda value, array: array,
) -> FileTrace:
    """Run a file and record every value.

    Args:
        inputs: Names of inputs to arrays.
        reference: What PyTorch computed from the same inputs.
        replace: Values to the arrays that their users get instead.
        constants: As in :meth:`FileRun.run`.
        change: As in :meth:`FileRun.run`.
    """
    watcher = _Watcher(reference, replace or {})
    trace = watcher.trace
    for value in run.inputs:
        if value.name in inputs:
            trace.prints[value].append(fingerprint_of(run.widened(np.asarray(inputs[value.name or ""]))))
    try:
        trace.outputs = run.run(inputs, watcher, constants=constants, change=change, rounds=watcher.is_rounded)
    except NodeError as error:
        trace.failed = error
    return trace


def measure_noise(
    run: FileRun,
    inputs: Mapping[str, Any],
    reference: Trace,
    trace: FileTrace,
    *,
    constants: Mapping[ir.Value, Any],
    replace: Mapping[ir.Value, Any] | None = None,
) -> tuple[dict[ir.Value, float], dict[ir.Value, float]]:
    """How much each value changes if the constants of the file are rounded otherwise, as a share of its size; and with
    the last bits of inputs and parameters, as a distance, which a sum has that is zero but for rounding. Whole numbers
    are exact, and stay: a comparison or a rounding may be between them and the next number.

    An exporter rounds what it computes of constants to the types of the file; in PyTorch's run they are exact. So are
    the results of nodes that only a runtime computes, in float32.

    Args:
        trace: The run to compare with, with the same ``constants`` and ``replace``.
    """
    generator = np.random.default_rng(12)

    def rounded(value: ir.Value, array: Any) -> Any:
        unit = 0.0 if array.dtype != np.float64 or is_moved_parameter(value) else _unit(value)
        if value.dtype is ir.DataType.DOUBLE and run.rounds_numbers and array.size == 1 and _meets_tensors(value):
            unit = UNITS["float32"]  # PyTorch's run has it rounded, if it is a number of Python
        # Equal constants are rounded alike: those of one product must not cancel.
        alike = np.random.default_rng(zlib.crc32(array.tobytes()))
        smallest = SMALLEST_NORMAL_FLOAT16 if value.dtype is ir.DataType.FLOAT16 else 0.0
        return nudge(array, unit, alike, smallest=smallest) if unit else array

    def moved(array: Any) -> Any:
        wide = run.widened(np.asarray(array))
        bit = 2 * UNITS.get(wide.dtype.name, 0.0)
        steps = np.where(wide == np.rint(wide), 0.0, generator.choice([-bit, bit], wide.shape)) if bit else 0.0
        return (wide * (1 + steps)).astype(wide.dtype) if bit else array

    def moved_parameter(value: ir.Value, array: Any) -> Any:
        return moved(array) if is_moved_parameter(value) else array

    noisy = trace_file(run.nudged(), inputs, reference, replace=replace, constants=constants, change=rounded)
    inputs = {name: moved(array) for name, array in inputs.items()}
    constants = {value: moved_parameter(value, array) for value, array in constants.items()}
    last_bits = trace_file(run, inputs, reference, replace=replace, constants=constants, change=moved_parameter)
    shares = {}
    for value, apart in _changes(trace, noisy).items():
        sizes = [each.norm for each in trace.prints[value]]
        if all(sizes):
            shares[value] = max(distance / size for distance, size in zip(apart, sizes, strict=True))
    return shares, {value: max(apart) for value, apart in _changes(trace, last_bits).items()}


def _meets_tensors(value: ir.Value) -> bool:
    return any(output.shape is None or len(output.shape) for user, _ in value.uses() for output in user.outputs)


def _changes(trace: FileTrace, other: FileTrace) -> dict[ir.Value, list[float]]:
    """The distances of each value between two runs; of one in a loop for each iteration."""
    changes = {}
    for value, prints in trace.prints.items():
        apart = [a.distance(b) for a, b in zip(prints, other.prints.get(value, []), strict=False) if a.size == b.size]
        if apart and len(apart) == len(prints):
            changes[value] = apart
    return changes


def is_moved_parameter(value: ir.Value) -> bool:
    """Whether a constant has exactly the numbers of the model's parameters."""
    plan = parameter_plan(value)
    return plan is not None and all(step.op_type in SELECTS_ELEMENTS | {"Constant"} for step in plan.steps)


def exact_constants(
    run: FileRun, reference: Trace, computed: Mapping[ir.Value, Any], own_trace: Trace | None = None
) -> dict[ir.Value, Any]:
    """The constants that are results of PyTorch's run rounded to the types of the file, to these results.

    Args:
        computed: Arrays of constants that were computed from rounded constants.
        own_trace: PyTorch's run in the types of the model. Its results are the constants of a file whose exporter
            computed them in these types: each is taken for the nearest result in float64 of the same call.
    """
    exact_arrays = {}
    for value, stored in run.constants():
        unit = _unit(value)
        if not unit or is_moved_parameter(value):
            continue
        array = computed[value] if value in computed else stored()
        its = fingerprint_of(array)

        def results(trace: Trace, allowed_error: float, its: Fingerprint = its) -> list[Content]:
            there = [
                content
                for content in trace.contents.equal_in_order(its, allowed_error)
                if content.computed and content.array is not None
            ]
            return sorted(there, key=lambda content: content.fingerprint.distance(its))

        exact = next((content for content in results(reference, 4 * unit) if _is_rounded(content, array, unit)), None)
        if exact is None and own_trace is not None:
            calls = {
                call
                for content in results(own_trace, 4 * unit)
                if _is_rounded(content, array, unit)
                for call in content.computed
            }
            exact = next(
                (content for content in results(reference, COMPUTED_WEIGHTS) if calls & content.computed.keys()), None
            )
        if exact is not None:
            exact_arrays[value] = exact.array.reshape(array.shape)
    return exact_arrays


def _is_rounded(result: Content, array: Any, unit: float) -> bool:
    """Whether an array is a floating-point result, rounded."""
    exact = result.array
    if exact.dtype.kind != "f" or not np.isfinite(exact).all():
        return False
    exact = exact.reshape(array.shape)
    size = np.maximum(np.abs(exact), result.fingerprint.norm)  # a sine near zero is as exact as its angle
    return bool((np.abs(exact - array) <= 4 * unit * size).all())


def computed_weights(
    run: FileRun, read: Callable[[str], Any], changed: Collection[str] = (), *, exact: bool = True
) -> dict[ir.Value, Any]:
    """The initializers that are computed from parameters, computed from these.

    Args:
        read: Gives a parameter by its ``state_dict`` key, as the run has it.
        changed: Parameters whose numbers are not those of the file: initializers that are such a one are given, too.
        exact: Whether the model ran in float64, in which other numbers are halfway between two integers.
    """
    weights, compute = {}, exact_step if run.is_wide else run_step
    for value in (*(value for value, _ in run.constants()), *(run.quantized_weights() if exact else ())):
        plan = parameter_plan(value)
        if plan is None or not plan.recorded or (is_moved_parameter(value) and not {*plan.keys} & {*changed}):
            continue
        weights[value] = compute_planned(plan, {key: read(key) for key in plan.inputs()}, compute)
    return weights


def rounded_constants(run: FileRun) -> Index:
    """The constants that may be rounded results of PyTorch's run."""
    index = Index()
    for value, stored in run.constants():
        if _unit(value) and not is_moved_parameter(value):
            index.add(stored())
    return index


def _unit(value: ir.Value) -> float:
    """The rounding of a constant's type."""
    dtype = value.dtype or ir.DataType.FLOAT
    return UNITS[dtype_name(dtype)] if dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16) else 0.0


class _Watcher:
    """Records values, and gives the file PyTorch's random numbers and choices."""

    def __init__(self, reference: Trace, replace: Mapping[ir.Value, Any]) -> None:
        self.trace = FileTrace()
        self._reference, self._replace = reference, replace
        self._drawn = defaultdict[tuple[ModuleCall, int], list[Any]](list)
        for call, array in reference.random_numbers:
            self._drawn[call, array.size].append(array)
        self._choices = defaultdict[tuple[int, ...], list[Any]](list)
        for choice in reference.choices:
            self._choices[choice.indices.shape].append(choice)

    def __call__(self, node: ir.Node, inputs: Sequence[Any], value: ir.Value, array: Any) -> Any:
        if not isinstance(array, np.ndarray):  # a sequence
            return array
        if draws(node):
            array = self._with_drawn(node, inputs, value, array)
        elif any(value_taken in self.trace.random for value_taken in node.inputs):
            self.trace.random.add(value)
        if array.dtype.kind == "i" and self._choices:
            array = self._with_choice(node, inputs, array)
        self.trace.prints[value].append(fingerprint_of(array))
        self.trace.shapes[value] = array.shape
        if value in self._replace and value not in self.trace.replaced:  # of a loop, PyTorch's first iteration is known
            self.trace.replaced[value] = relative_error(self._replace[value], array)
            return self._replace[value]
        return array

    def is_rounded(self, number: Any) -> bool:
        """Whether a number is one of Python's in PyTorch's run, and not a tensor."""
        return not self._reference.contents.equal_in_order(fingerprint_of(number))

    def _with_drawn(self, node: ir.Node, inputs: Sequence[Any], value: ir.Value, array: Any) -> Any:
        if (
            not self._reference.random_numbers
        ):  # a file that draws numbers where PyTorch does not is wrong, in each run alike
            return np.zeros_like(array)
        owner = owner_of(node)
        for call in owner.calls if owner is not None else ():
            drawn = self._drawn.get((call, array.size))
            if drawn and value is node.outputs[0] and _may_be_drawn(node, drawn[0], array):
                numbers = drawn.pop(0).reshape(array.shape)
                numbers = 1 - numbers if _is_compared(node) and _is_mask(numbers) else numbers
                return numbers.astype(array.dtype) if node.op_type != "Dropout" else _dropped(node, inputs, numbers)
        self.trace.random.add(value)
        return array

    def _with_choice(self, node: ir.Node, inputs: Sequence[Any], indices: Any) -> Any:
        scores = next((array for array in inputs if isinstance(array, np.ndarray) and array.dtype.kind == "f"), None)
        if scores is None:
            return indices
        known = self._choices.get(indices.shape, [])
        near = [
            (apart, place)
            for place, right in enumerate(known)
            if right.scores.shape == scores.shape
            and (apart := relative_error(right.scores, scores)) < SCORES_OF_PYTORCH
        ]
        if any(np.array_equal(known[place].indices, indices) for _, place in near):
            return indices
        for _, place in sorted(near):
            if is_tie(known[place].scores, scores, known[place].indices, indices):
                self.trace.ties[node] = None
                known.append(known.pop(place))  # another node made another choice, or repeats this one
                return known[-1].indices.astype(indices.dtype)
        return indices


def _may_be_drawn(node: ir.Node, numbers: Any, array: Any) -> bool:
    """Whether a node could have drawn PyTorch's numbers. Files draw some by others, such as a permutation by uniform
    ones.
    """
    draws_mask = node.op_type in ("Bernoulli", "Dropout")
    return numbers.dtype.kind == array.dtype.kind and (_is_compared(node) or draws_mask == _is_mask(numbers))


def _is_mask(numbers: Any) -> bool:
    return bool(np.isin(numbers, (0, 1)).all())


def _is_compared(node: ir.Node) -> bool:
    """Whether a node draws uniform numbers that choose what has a larger probability: 0 is always, 1 never chosen."""
    uses = [(user.op_type, place) for user, place in node.outputs[0].uses()]
    return node.op_type.startswith("RandomUniform") and {*uses} == {("Less", 0)}


def _dropped(node: ir.Node, inputs: Sequence[Any], mask: Any) -> Any:
    """The output of a ``Dropout`` that keeps the elements that PyTorch's kept."""
    kept = 1 - (0.5 if inputs[1] is None else inputs[1])
    return inputs[0] * mask / (kept if node.outputs[0].dtype is ir.DataType.DOUBLE else np.float32(kept))

"""Runs a file node by node and shows every value to a watcher, who may replace it.

Each operator is computed as the standard defines it, by onnx's reference implementations in NumPy and
:mod:`.numpy_kernels`. An operator of ONNX Runtime's own is run by ONNX Runtime. In *wide* runs all floating-point
numbers are float64, from the same numbers as in the file, so that nothing is rounded on the way; in others each value
has the type that the file gives it.

``If``, ``Loop`` and ``Scan`` are walked here: the watcher sees the values of branches and of each iteration like any
other.

It is longer than other files because graphs inside nodes call back into the run they belong to: the operators, the
values that are kept and the walk would be one circle of imports in three files.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import onnx_ir as ir

from modelexport.errors import UsageError
from modelexport.graph.missing_types import fill_types
from modelexport.graph.nodes import all_nodes, initializers, nested_graphs, values_taken
from modelexport.graph.operator_kinds import READ_SIZES_ONLY
from modelexport.graph.parameter_plans import parameter_plan
from modelexport.traces.node_computation import NodeComputation, NodeError
from modelexport.traces.numpy_kernels import makes_whole_numbers, without_last_bits

Watch = Callable[[ir.Node, Sequence[Any], ir.Value, Any], Any]
"""Called with a node, its inputs, one of its outputs and the array for that; gives the array that its users get."""
Change = Callable[[ir.Value, Any], Any]
Rounds = Callable[[Any], bool]
"""Decides whether a number computed from sizes is rounded to float32 when it meets a tensor."""


def as_is(node: ir.Node, inputs: Sequence[Any], value: ir.Value, array: Any) -> Any:
    """A watcher that keeps every value."""
    return array


def type_of(values: Iterable[ir.Value]) -> str:
    """The type of a model with these values: the half precision that one has, or float32."""
    types = {value.dtype.name.lower() for value in values if value.dtype is not None}
    return next((name for name in ("float16", "bfloat16") if name in types), "float32")


class FileRun:
    """A model in memory that can be run several times.

    Args:
        model: The model.
        in_float64_for: The type of the model, if all of its floating-point numbers become float64 and a conversion to a
            narrower type rounds; ``None`` for a run in its own types.
        kernels: Further implementations of standard operators, by name, as onnx's ``OpRun``.
        other_branches: Run the branches that are not taken, too, where they run, so that their calls are compared.
    """

    def __init__(
        self,
        model: ir.Model,
        *,
        in_float64_for: str | None,
        kernels: Mapping[str, Any] | None = None,
        nudged: bool = False,
        other_branches: bool = True,
    ) -> None:
        self.other_branches = other_branches
        fill_types(model)  # a result in half precision is rounded, whether the file declares its type or not
        self._model, self._in_float64_for, self._given_kernels = model, in_float64_for, kernels or {}
        self.is_wide = in_float64_for is not None
        self.rounds_numbers = in_float64_for not in (None, "float64")
        self.nodes = NodeComputation(model.opset_imports, in_float64_for, self._given_kernels, nudged=nudged)
        self.widened = self.nodes.widened
        self.functions = model.functions
        self._uses: dict[ir.Graph, dict[ir.Node, list[ir.Value]]] = {}

    def nudged(self) -> FileRun:
        """A run of the same model in which what was rounded to float32 is rounded otherwise: the numbers in attributes
        and those computed from sizes, and the results of nodes that only a runtime computes. The caller changes
        the constants.
        """
        other = FileRun(self._model, in_float64_for=self._in_float64_for, kernels=self._given_kernels, nudged=True)
        other._uses = self._uses
        return other

    @property
    def inputs(self) -> Sequence[ir.Value]:
        """The inputs of the graph."""
        return list(self._model.graph.inputs)

    def run(
        self,
        inputs: Mapping[str, Any],
        watch: Watch = as_is,
        *,
        constants: Mapping[ir.Value, Any] | None = None,
        change: Change = lambda value, array: array,
        rounds: Rounds = lambda number: True,
    ) -> dict[str, Any]:
        """Run the model node by node.

        Args:
            inputs: Names of inputs to arrays. Others than the graph's are ignored.
            watch: Sees every value, in the order in which they are computed.
            constants: Initializers and outputs of ``Constant`` to other arrays for them.
            change: Called with each other of these and its array; gives the array to use instead.
            rounds: Called with each number that is computed from sizes and used with a tensor.

        Returns:
            The names of the outputs to arrays.

        Raises:
            NodeError: A node cannot be computed.
            UsageError: An input is missing.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # NumPy says that the mean of nothing is NaN
            return _Run(self, watch, constants or {}, change, rounds).whole(inputs)

    def values(self, wanted: Sequence[ir.Value], known: Mapping[ir.Value, Any]) -> list[Any]:
        """Some values of the main graph, computed from others; only the nodes in between are run.

        Args:
            known: Values to their arrays; those of the inputs that are needed are among them.

        Raises:
            NodeError: A node cannot be computed.
            UsageError: An input that is needed was not given.
        """
        run = _Run(self, as_is, {}, lambda value, array: array, lambda number: True)
        needed, pending = set[ir.Node](), list(wanted)
        while pending:
            value = pending.pop()
            node = value.producer()
            if node is not None and node not in needed and (value not in known or value in wanted):
                needed.add(node)
                pending += values_taken(node)
        return run.some([node for node in self._model.graph if node in needed], wanted, known)

    def weight(self, value: ir.Value) -> Any:
        """The array of an initializer, as this run has it; it is not kept."""
        assert value.const_value is not None
        return self.widened(value.const_value.numpy())

    def constants(self) -> Iterator[tuple[ir.Value, Callable[[], Any]]]:
        """The floating-point initializers and outputs of ``Constant``, with what gives them as this run has them."""
        for value in initializers(self._model):
            if value.dtype is not None and value.dtype.is_floating_point() and value.const_value is not None:
                yield value, partial(self.weight, value)
        for node in all_nodes(self._model):
            if node.op_type == "Constant" and not node.domain:
                (array,) = self.nodes.compute(node, ())
                if isinstance(array, np.ndarray) and array.dtype.kind == "f":
                    yield node.outputs[0], partial(_unchanged, array)

    def quantized_weights(self) -> list[ir.Value]:
        """The initializers that are integers which the file computes from parameters."""
        plans = ((value, parameter_plan(value)) for value in initializers(self._model))
        rounding = [(value, plan) for value, plan in plans if plan is not None and plan.quantizes]
        return [value for value, _ in rounding if value.dtype is not None and not value.dtype.is_floating_point()]

    def last_uses(self, graph: ir.Graph) -> Mapping[ir.Node, list[ir.Value]]:
        """The values of a graph that neither it nor a nested graph uses after a node of it."""
        if graph not in self._uses:
            last: dict[ir.Value, ir.Node] = {}
            for node in graph:
                last |= {value: node for value in (*values_taken(node), *node.outputs) if value.graph is graph}
            last_uses: dict[ir.Node, list[ir.Value]] = {}
            for value in last.keys() - {*graph.outputs}:
                last_uses.setdefault(last[value], []).append(value)
            self._uses[graph] = last_uses
        return self._uses[graph]


class _Run:
    """One run: the arrays of all values that are still needed."""

    def __init__(
        self, run: FileRun, watch: Watch, constants: Mapping[ir.Value, Any], change: Change, rounds: Rounds
    ) -> None:
        self._of, self._watch, self._constants, self._change, self._rounds = run, watch, constants, change, rounds
        self._arrays: dict[ir.Value, Any] = {}
        self._of_sizes = WeakValueDictionary[int, Any]()
        """The arrays that were computed from sizes and constants alone, by identity."""

    def whole(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        graph = self._of._model.graph
        for value in graph.inputs:
            if value.name in inputs:
                self._arrays[value] = self._of.widened(np.asarray(inputs[value.name or ""]))
            elif not value.is_initializer():
                raise UsageError(f"the file takes an input {value.name}, which was not given")
        self._nodes(graph)
        return {value.name or "": self._array(value) for value in graph.outputs}

    def some(self, nodes: Sequence[ir.Node], wanted: Sequence[ir.Value], known: Mapping[ir.Value, Any]) -> list[Any]:
        """Some values, from nodes in the order of the graph; each node gets what is given."""
        arrays = {}
        self._arrays.update({value: self._of.widened(np.asarray(array)) for value, array in known.items()})
        for node in nodes:
            self._node(node)
            for value in node.outputs:
                if value in wanted:
                    arrays[value] = self._arrays[value]
                if value in known:
                    self._arrays[value] = self._of.widened(np.asarray(known[value]))
        return [arrays.get(value, self._arrays.get(value)) for value in wanted]

    def _array(self, value: ir.Value | None) -> Any:
        if value is None:
            return None
        if value in self._arrays:
            return self._arrays[value]
        if value.const_value is None:
            raise UsageError(f"the file uses {value.name}, which nothing computes: export it again")
        self._arrays[value] = array = self._constant(value, lambda: self._of.weight(value))
        return array

    def _constant(self, value: ir.Value, read: Callable[[], Any]) -> Any:
        if value in self._constants:
            return self._of.widened(self._constants[value])
        return self._change(value, read())

    def _nodes(self, graph: ir.Graph | ir.Function) -> None:
        ends = self._of.last_uses(graph) if isinstance(graph, ir.Graph) else {}
        for node in graph:
            self._node(node)
            for value in ends.get(node, ()):
                self._arrays.pop(value, None)

    def _node(self, node: ir.Node) -> None:
        inputs = [self._array(value) for value in node.inputs]
        outputs: Iterable[Any]
        if nested_graphs(node):
            outputs = self._with_graphs(node, inputs)
        elif (function := self._of.functions.get(node.op_identifier())) is not None:
            outputs = self._body(function, [*inputs, *[None] * (len(function.inputs) - len(inputs))])
        else:
            of_sizes = self._takes_only_sizes(node, inputs)
            outputs = self._computed(node, inputs, of_sizes=of_sizes)
            if of_sizes:
                self._of_sizes.update({id(array): array for array in outputs if isinstance(array, np.ndarray)})
        for value, computed in zip(node.outputs, outputs, strict=False):
            if value.name and computed is not None:
                fixed = node.op_type == "Constant" and isinstance(computed, np.ndarray)
                array = self._constant(value, partial(_unchanged, computed)) if fixed else computed
                self._arrays[value] = self._watch(node, inputs, value, array)

    def _takes_only_sizes(self, node: ir.Node, inputs: Sequence[Any]) -> bool:
        """Whether a node computes from sizes and constants alone, and not from constants alone."""
        if node.op_type in READ_SIZES_ONLY:
            return True
        of_sizes = [array is not None and self._of_sizes.get(id(array)) is array for array in inputs]
        return any(of_sizes) and all(
            known or value is None or _is_number_of_the_file(value)
            for value, known in zip(node.inputs, of_sizes, strict=True)
        )

    def _computed(self, node: ir.Node, inputs: Sequence[Any], *, of_sizes: bool) -> tuple[Any, ...]:
        """The outputs of a node. A number that is computed from sizes is one of Python's in PyTorch: it is exact, and
        rounded to float32 where a tensor is computed with it.
        """

        def is_of_python(array: Any) -> bool:
            is_number = isinstance(array, np.ndarray) and array.size == 1 and array.dtype == np.float64
            return is_number and self._of_sizes.get(id(array)) is array and self._rounds(array)

        def counted(value: ir.Value | None, array: Any) -> Any:
            in_double = value is not None and value.dtype is ir.DataType.DOUBLE
            is_float = isinstance(array, np.ndarray) and array.dtype == np.float64
            is_exact = in_double and self._of_sizes.get(id(array)) is array
            return without_last_bits(array) if is_float and not is_exact else array

        if self._of.is_wide and makes_whole_numbers(node.op_type, node.outputs[0].dtype):
            inputs = [*map(counted, node.inputs, inputs)]
        if not self._of.rounds_numbers:
            return self._of.nodes.compute(node, inputs)
        if of_sizes:
            outputs = self._of.nodes.compute(node, inputs)
            if all(getattr(array, "size", 0) == 1 for array in outputs):
                return outputs
        rounded = [self._of.nodes.rounded(array) if is_of_python(array) else array for array in inputs]
        return self._of.nodes.compute(node, rounded)

    def _with_graphs(self, node: ir.Node, inputs: Sequence[Any]) -> list[Any]:
        walks = {"If": self._if, "Loop": self._loop, "Scan": self._scan, "SequenceMap": self._sequence_map}
        try:
            return walks[node.op_type](node, inputs)
        except UsageError:
            raise
        except Exception as error:  # a variant of an operator that is not walked here, as Scan of opset 8
            raise NodeError(node, NotImplementedError(str(error))) from error

    def _body(self, graph: ir.Graph | ir.Function, inputs: Sequence[Any]) -> list[Any]:
        for value, array in zip(graph.inputs, inputs, strict=True):
            self._arrays[value] = array
        self._nodes(graph)
        return [self._array(value) for value in graph.outputs]

    def _if(self, node: ir.Node, inputs: Sequence[Any]) -> list[Any]:
        names = ("then_branch", "else_branch") if bool(np.asarray(inputs[0]).item()) else ("else_branch", "then_branch")
        taken, other = (node.attributes[name].as_graph() for name in names)
        with suppress(NodeError, UsageError):
            if self._of.other_branches:
                self._body(other, ())
        return self._body(taken, ())

    def _loop(self, node: ir.Node, inputs: Sequence[Any]) -> list[Any]:
        body = node.attributes["body"].as_graph()
        most = None if inputs[0] is None else int(np.asarray(inputs[0]).item())
        goes_on = inputs[1] is None or bool(np.asarray(inputs[1]).item())
        carried = list(inputs[2:])
        scanned: list[list[Any]] = [[] for _ in body.outputs[1 + len(carried) :]]
        count = 0
        while goes_on and (most is None or count < most):
            results = self._body(body, [np.array(count, np.int64), np.array(goes_on), *carried])
            goes_on = bool(np.asarray(results[0]).item())
            carried = results[1 : 1 + len(carried)]
            for kept, array in zip(scanned, results[1 + len(carried) :], strict=True):
                kept.append(array)
            count += 1
        empty = [_empty(value) for value in body.outputs[1 + len(carried) :]]
        return [*carried, *(np.stack(kept) if kept else none for kept, none in zip(scanned, empty, strict=True))]

    def _scan(self, node: ir.Node, inputs: Sequence[Any]) -> list[Any]:
        body = node.attributes["body"].as_graph()
        count = node.attributes["num_scan_inputs"].as_int()
        states, sequences = list(inputs[: len(inputs) - count]), list(inputs[len(inputs) - count :])

        def listed(name: str, size: int) -> Sequence[int]:
            return node.attributes[name].as_ints() if name in node.attributes else [0] * size

        axes, back = listed("scan_input_axes", count), listed("scan_input_directions", count)
        scanned_count = len(body.outputs) - len(states)
        out_axes, out_back = listed("scan_output_axes", scanned_count), listed("scan_output_directions", scanned_count)
        moved = [np.moveaxis(array, axis, 0) for array, axis in zip(sequences, axes, strict=True)]
        moved = [array[::-1] if turned else array for array, turned in zip(moved, back, strict=True)]
        scanned: list[list[Any]] = [[] for _ in range(scanned_count)]
        for step in range(len(moved[0])):
            results = self._body(body, [*states, *(array[step, ...] for array in moved)])
            states = results[: len(states)]
            for kept, array in zip(scanned, results[len(states) :], strict=True):
                kept.append(array)
        stacked = [np.stack(kept[::-1] if turned else kept) for kept, turned in zip(scanned, out_back, strict=True)]
        return [*states, *(np.moveaxis(array, 0, axis) for array, axis in zip(stacked, out_axes, strict=True))]

    def _sequence_map(self, node: ir.Node, inputs: Sequence[Any]) -> list[Any]:
        body = node.attributes["body"].as_graph()
        each = [
            [argument[i] if isinstance(argument, list) else argument for argument in inputs]
            for i in range(len(inputs[0]))
        ]
        results = [self._body(body, taken) for taken in each]
        return [[result[i] for result in results] for i in range(len(body.outputs))]


def _is_number_of_the_file(value: ir.Value) -> bool:
    """Whether a value is a constant that does not come from a parameter."""
    producer = value.producer()
    is_constant = value.const_value is not None if producer is None else producer.op_type == "Constant"
    return is_constant and parameter_plan(value) is None


def _unchanged(array: Any) -> Any:
    return array


def _empty(value: ir.Value) -> Any:
    """The result that a loop without iterations collects: an array without rows."""
    sizes = [size if isinstance(size, int) else 0 for size in value.shape or ()]
    return np.zeros([0, *sizes], value.dtype.numpy() if value.dtype is not None else np.float32)

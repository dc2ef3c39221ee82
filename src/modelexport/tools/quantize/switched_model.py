"""One model with all methods of all modules; each run chooses the method of each module.

Every node that can be quantized is in the branches of an ``If``: one for each method, and one for the original node. So
one session serves all choices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import msgspec
import numpy as np
import onnx_ir as ir

from modelexport.core.text import suggest
from modelexport.core.timed_stages import with_progress
from modelexport.errors import InputsError, UsageError
from modelexport.graph.copies import copy_of, value_like
from modelexport.graph.node_owners import calls_text, owner_of
from modelexport.graph.nodes import all_nodes, nodes_behind
from modelexport.regions.region import Region
from modelexport.runtime.saturating_products import unsigned_copy
from modelexport.runtime.sessions import Session, open_session, run_session
from modelexport.tagged.file import TaggedFile
from modelexport.tools.quantize.equal_method_groups import find_groups, merged, weighted_nodes
from modelexport.tools.quantize.methods import Method, Ranges, apply_method
from modelexport.tools.quantize.quantized_regions import cut_for_quantizer, import_operators
from modelexport.tools.quantize.recipes import can_quantize
from modelexport.tools.quantize.weights_behind import weight_behind, weights_behind
from modelexport.traces.array_differences import is_comparable

Choice = Mapping[int, Method]
"""Positions of units to their methods; the others are kept."""

_CONDITION = ir.TensorType(ir.DataType.BOOL)


class Unit(msgspec.Struct, frozen=True):
    """Nodes that have to get the same method: those of calls, with their groups (:mod:`.equal_method_groups`)."""

    nodes: tuple[str, ...]
    calls: tuple[str, ...]
    """The addresses of the calls that own them, in the order of the graph."""


def find_units(tagged: TaggedFile, methods: Collection[Method]) -> list[Unit]:
    """The units of a file that one of the methods can quantize, in the order of the graph."""
    weighted = weighted_nodes(tagged.model)
    owners = {
        node.name or "": owner.calls
        for node in tagged.model.graph
        if any(can_quantize(method, node, weighted) for method in methods) and (owner := owner_of(node)) is not None
    }
    by_call: dict[object, list[str]] = defaultdict(list)
    for name, calls in owners.items():
        for call in calls:
            by_call[call].append(name)
    groups = ([name for name in group.nodes if name in owners] for group in find_groups(tagged))
    return [
        Unit(tuple(names), tuple(dict.fromkeys(str(call) for name in names for call in owners[name])))
        for names in merged([*([name] for name in owners), *by_call.values(), *groups])
    ]


class SwitchableSession:
    """A session for a model and its quantized versions, for the value of one output; a context manager."""

    failure = ""
    """Why the last choice did not run, if another process runs them."""

    def __init__(
        self,
        tagged: TaggedFile,
        units: Sequence[Unit],
        methods: Sequence[Method],
        *,
        ranges: Ranges | None = None,
        output: str | None = None,
    ) -> None:
        """Quantize every unit by every method, and open the session.

        Args:
            ranges: What :func:`.quantize.calibrate` measured, for methods that need it.
            output: The output that is computed; by default the first one of floating-point numbers.

        Raises:
            UsageError: A library fails, the runtime has no kernel, or there is no such output.
        """
        model, self.units = copy_of(tagged.model), units
        self.output = _only_output(model, output)
        self.added: dict[tuple[int, Method], int] = {}
        """Units and methods to the bytes of weights that come with the method, or go (negative)."""
        weighted, nodes = weighted_nodes(model), {node.name: node for node in model.graph}
        used = set(nodes_behind(model.graph.outputs))
        users = _users(model)
        for index, unit in enumerate(with_progress(units)):
            held: dict[Method | None, dict[str | None, int]] = defaultdict(dict)
            for node in (nodes[name] for name in unit.nodes):
                weights = (weight for value in node.inputs for weight in weights_behind(value))
                float_weights = _sizes(weight for weight in weights if users[weight.name].issubset(unit.nodes))
                held[None] |= float_weights
                branches: list[tuple[str, ir.Model]] = []
                for method in methods:
                    if not can_quantize(method, node, weighted):
                        held[method] |= float_weights
                        continue
                    cut = cut_for_quantizer(model, Region.of([node]))
                    quantized = apply_method(cut, method, ranges, calls_text([node]))
                    import_operators(model, quantized)
                    held[method] |= _sizes(quantized.graph.initializers.values())
                    branches.append((_switch(index, method), quantized))
                if branches and node in used:
                    _put(model.graph, node, branches)
            self.added |= {(index, m): sum(held[m].values()) - sum(held[None].values()) for m in methods}
        self._switches = [value.name or "" for value in model.graph.inputs if value.type is _CONDITION]
        self._folder = tagged.path.parent
        self._runs = self._opened(model)
        unsigned = unsigned_copy(model)
        self._exact = self._opened(unsigned) if unsigned is not None else self._runs
        self.exactness = (True,) if unsigned is None else (True, False)
        """With which values of ``exact`` a choice has to be run: both if the results may differ."""

    def _opened(self, model: ir.Model) -> Session:
        return open_session(model, folder=self._folder, optimized=True, runs_often=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """End what runs the choices, if that is another process."""

    def run(self, feeds: Mapping[str, Any], choice: Choice | None = None, *, exact: bool = True) -> Any:
        """The output for inputs, with a method for some units.

        Args:
            exact: With exact integers; otherwise as this processor computes them, which may saturate.

        Raises:
            UsageError: The model does not run with these inputs.
            InputsError: What it computes as it is, to compare with, has no finite number.
        """
        chosen = {_switch(index, method) for index, method in (choice or {}).items()}
        switches = {name: np.array(name in chosen) for name in self._switches}
        result = run_session(self._exact if exact else self._runs, {**feeds, **switches})[self.output]
        return self._right(result) if not chosen else result

    def _right(self, result: Any) -> Any:
        """A result to compare with."""
        if not is_comparable(result):
            raise InputsError(
                f"{self.output} has no finite number for a run of the data: give inputs that the model is for"
            )
        return result

    def kept(self, feeds: Mapping[str, Any]) -> Any:
        """The output with every unit kept, where choices run."""
        return self.run(feeds)

    def opened(self, model: ir.Model) -> list[Callable[[Mapping[str, Any]], Any]]:
        """Open another model as users do, where choices run; returns functions of inputs that give the output.

        They are two if the model's products of integers saturate on some processors: the other's are exact.
        """
        sessions = [self._opened(each) for each in (model, unsigned_copy(model)) if each is not None]

        def computed(session: Session, feeds: Mapping[str, Any]) -> Any:
            return run_session(session, feeds)[self.output]

        return [partial(computed, session) for session in sessions]


def _switch(index: int, method: Method) -> str:
    return f"{index}:{method}"


def _only_output(model: ir.Model, name: str | None) -> str:
    """Remove all outputs but one; returns its name."""
    outputs = list(model.graph.outputs)
    names = [value.name or "" for value in outputs]
    if name is not None and name not in names:
        raise UsageError(f"the model has no output '{name}'{suggest(name, names)}; it has {', '.join(names)}")
    floating = (value for value in outputs if value.dtype is None or value.dtype.is_floating_point())
    chosen = outputs[names.index(name)] if name is not None else next(floating, None)
    if chosen is None:
        raise UsageError("the model has no output of floating-point numbers: name one with --compare")
    model.graph.outputs[:] = [chosen]
    return chosen.name or ""


def _users(model: ir.Model) -> dict[str | None, set[str | None]]:
    """Names of weights to those of the nodes that read them, as they are or transposed."""
    users: dict[str | None, set[str | None]] = defaultdict(set)
    for node in all_nodes(model):
        for value in node.inputs:
            weight = weight_behind(value)
            if weight is not None and weight_behind(node.outputs[0]) is None:
                users[weight.name].add(node.name)
    return users


def _sizes(weights: Iterable[ir.Value]) -> dict[str | None, int]:
    return {value.name: value.const_value.nbytes for value in weights if value.const_value is not None}


def _put(graph: ir.Graph, node: ir.Node, branches: Sequence[tuple[str, ir.Model]]) -> None:
    """Replace a node by a choice between itself and the quantized models that were made from it."""
    live = [value for value in node.outputs if value.uses() or value.is_graph_output()]
    same = [value_like(value, f"{value.name} kept" if value.name else None) for value in node.outputs]
    kept = ir.Node(node.domain, node.op_type, node.inputs, list(node.attributes.values()), outputs=same)
    nodes, results = [kept], [kept.outputs[node.outputs.index(value)] for value in live]
    for switch, quantized in branches:
        condition = next((value for value in graph.inputs if value.name == switch), None)
        if condition is None:
            condition = ir.Value(name=switch, type=_CONDITION, shape=ir.Shape([]))
            graph.inputs.append(condition)
        then = ir.Attr("then_branch", ir.AttributeType.GRAPH, _branch(graph, node, quantized, live, switch))
        otherwise = ir.Attr("else_branch", ir.AttributeType.GRAPH, ir.Graph([], results, nodes=nodes, name="kept"))
        chosen = ir.Node(
            "", "If", [condition], [then, otherwise], outputs=[value_like(v, f"{v.name} if {switch}") for v in live]
        )
        nodes, results = [chosen], list(chosen.outputs)
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, live, results)


def _branch(graph: ir.Graph, node: ir.Node, quantized: ir.Model, live: Sequence[ir.Value], switch: str) -> ir.Graph:
    """A quantized model as a branch that takes its inputs from the graph around it, where its weights are put, too."""
    branch = quantized.graph
    results = {value.name: value for value in branch.outputs}
    branch.outputs[:] = [results[value.name] for value in live]
    taken = {value.name: value for value in node.inputs if value is not None}
    for value in branch.inputs:
        ir.convenience.replace_all_uses_with(value, taken[value.name])
    branch.inputs.clear()
    held = list(branch.initializers.values())
    branch.initializers.clear()
    for value in (*held, *(value for inner in branch for value in inner.outputs if value.name)):
        value.name = f"{value.name} {node.name} {switch}"
    for value in held:
        graph.register_initializer(value)
    for inner in branch:
        inner.name = None
    branch.name = switch
    return branch

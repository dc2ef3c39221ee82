"""The module stack of a node, from the local functions that it is in; the functions are inlined.

``torch.onnx.export(dynamo=False, export_modules_as_functions=True)`` makes a function for each module class: the name
of the function is the class, its domain the Python module of the class. Each node that calls a function is a call of a
module. The module follows from its parameters: inputs ``up.1.linear.weight`` and ``up.1.norm.weight`` mean ``up.1``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from modelexport.core.calls import common_stack
from modelexport.core.owners import Evidence
from modelexport.graph.copies import copy_of
from modelexport.graph.inlined_functions import inline_calls
from modelexport.graph.nodes import all_nodes, nested_graphs
from modelexport.tagged.found_calls.recorded_stacks import CallSource, Found, StackEntry

_CALL = "modelexport.function_call"


@dataclass(eq=False)
class _Call:
    """One node that calls a function."""

    node: ir.Node
    function: ir.OperatorIdentifier
    enclosing: _Call | None
    keys: frozenset[str]
    """The names of the initializers among its inputs."""
    inside: list[_Call] = field(default_factory=list)
    path: str | None = None
    """The module path that follows from the names of its parameters."""


def inline_functions(model: ir.Model) -> dict[ir.Node, Found]:
    """Inline all functions, in place.

    Returns:
        The stack of every node that was in a function. The evidence is ``derived`` if the path of every call on it
        follows from parameters, and ``inferred`` otherwise.
    """
    if not model.functions:
        return {}
    calls: list[_Call] = []
    _separate(model, model.graph, {}, None, calls)
    _find_paths(calls)
    makers = {value.producer() for value in model.graph.outputs}
    root = next((call for call in calls if {call.node} == makers), None)  # everything is in one function
    inline_calls(model)
    model.functions.clear()
    stacks = {None: (StackEntry(""),)} | _stacks(calls, root)
    found_stacks = {}
    for node in all_nodes(model):
        call = node.meta.pop(_CALL, None)
        if call is not None:
            has_path = all(above is root or above.path is not None for above in _with_enclosing(call))
            found_stacks[node] = Found(
                stacks[call], Evidence.DERIVED if has_path else Evidence.INFERRED, CallSource.FUNCTIONS
            )
    return found_stacks


def _separate(
    model: ir.Model,
    nodes: Iterable[ir.Node],
    names: Mapping[ir.Value, str],
    enclosing: _Call | None,
    calls: list[_Call],
) -> None:
    """Make a copy of the function for every call, so that the nodes of the copy know their call.

    Args:
        names: The initializers that are passed as inputs of the enclosing function.
    """
    for node in nodes:
        if enclosing is not None:
            node.meta[_CALL] = enclosing
        for graph in nested_graphs(node):
            _separate(model, graph, names, enclosing, calls)
        function = model.functions.get(node.op_identifier())
        if function is None:
            continue
        input_names = [
            _initializer_name(value) or names.get(value) if value is not None else None for value in node.inputs
        ]
        call = _Call(
            node, node.op_identifier(), enclosing, frozenset(name for name in input_names if name and "." in name)
        )
        calls.append(call)
        if enclosing is not None:
            enclosing.inside.append(call)
        copy = copy_of(function)
        copy.overload = f"{function.overload}#{len(calls)}"
        node.overload = copy.overload
        model.functions[copy.identifier()] = copy
        inner = {value: name for value, name in zip(copy.inputs, input_names, strict=False) if name}
        _separate(model, copy, inner, call, calls)


def _initializer_name(value: ir.Value) -> str | None:
    """The name of an initializer, or of an initializer that the exporter replaced by an equal one."""
    producer = value.producer()
    source = producer.inputs[0] if producer is not None and producer.op_type == "Identity" else value
    return value.name if source is not None and source.is_initializer() else None


def _find_paths(calls: list[_Call]) -> None:
    for call in reversed(calls):  # calls inside come later
        common = list(common_stack(name.split(".")[:-1] for name in call.keys))
        taken = {inner.path for inner in call.inside}
        while common and ".".join(common) in taken:
            common.pop()
        call.path = ".".join(common) or None


def _stacks(calls: list[_Call], root: _Call | None) -> dict[_Call | None, tuple[StackEntry, ...]]:
    stacks: dict[_Call | None, tuple[StackEntry, ...]] = {}
    for call in calls:
        module, class_name, _ = call.function
        if call is root:
            stacks[call] = (StackEntry("", module, class_name, identity=call),)
            continue
        above = stacks[call.enclosing] if call.enclosing is not None else (StackEntry(""),)
        path = call.path or ".".join(part for part in (above[-1].path, class_name) if part)
        stacks[call] = (*above, StackEntry(path, module, class_name, identity=call))
    return stacks


def _with_enclosing(call: _Call) -> Iterable[_Call]:
    above: _Call | None = call
    while above is not None:
        yield above
        above = above.enclosing

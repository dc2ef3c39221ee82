"""Whether the functions of a serialized model can be inlined, and how many nodes there would be then."""

from __future__ import annotations

from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter

import onnx

from modelexport.core.limits import CALL_DEPTH, INLINED_NODES
from modelexport.errors import FileFormatError
from modelexport.files.serialized import graphs_in, with_nested

_Key = tuple[str, str, str]


def check_functions(model: onnx.ModelProto) -> None:
    """Refuse functions that call themselves, are not graphs, or call each other so often that they cannot be inlined.

    Raises:
        FileFormatError: A function calls itself, or the calls are too many or nested too deeply.
    """
    if not model.functions:
        return
    for function in model.functions:
        _check_body(function.name, function.node, {*function.input}, function.output)
    called = {
        (one.domain, one.name, one.overload): [_identifier(node) for node in with_nested(one.node)]
        for one in model.functions
    }
    inner = {key: [other for other in calls if other in called] for key, calls in called.items()}
    sizes: dict[_Key, int] = {}
    depth: dict[_Key, int] = {}
    try:
        for key in TopologicalSorter(inner).static_order():
            sizes[key] = len(called[key]) + sum(sizes[other] for other in inner[key])
            depth[key] = 1 + max((depth[other] for other in inner[key]), default=0)
    except CycleError as error:
        name = error.args[1][0][1]
        raise FileFormatError(f"the function {name!r} of the model calls itself: it cannot be inlined") from error
    if max(depth.values()) > CALL_DEPTH:
        raise FileFormatError(f"the calls of the model's functions are nested more than {CALL_DEPTH} deep")
    total = sum(1 + sizes.get(_identifier(node), 0) for node in with_nested(model.graph.node))
    if total > INLINED_NODES:
        raise FileFormatError(
            f"the model would have {total:,} nodes with its functions inlined, and at most {INLINED_NODES:,} are read"
        )


def _check_body(name: str, nodes: Iterable[onnx.NodeProto], known: set[str], outputs: Iterable[str]) -> None:
    """Refuse a function that uses a value before it is made, makes one twice, or gives one that nobody made."""
    made: set[str] = set()
    for node in nodes:
        _check_known(name, node.input, known)
        for graph in (graph for attribute in node.attribute for graph in graphs_in(attribute)):
            inside = {*known, *(value.name for value in (*graph.input, *graph.initializer))}
            _check_body(name, graph.node, inside, [value.name for value in graph.output])
        if again := next((value for value in node.output if value and value in made), None):
            raise FileFormatError(f"the function {name!r} of the model makes the value {again!r} twice")
        made.update(node.output)
        known.update(node.output)
    _check_known(name, outputs, known)


def _check_known(name: str, values: Iterable[str], known: set[str]) -> None:
    if missing := next((value for value in values if value and value not in known), None):
        raise FileFormatError(
            f"the function {name!r} of the model uses the value {missing!r}, which nothing made before"
        )


def _identifier(node: onnx.NodeProto) -> _Key:
    return node.domain, node.op_type, node.overload

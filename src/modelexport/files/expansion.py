"""The size of a model after its functions are inlined, computed without inlining them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

from modelexport.core.limits import CALL_DEPTH, INLINED_NODES
from modelexport.errors import FileFormatError
from modelexport.files.tensors import with_nested

_Key = tuple[str, str, str]


def check_functions(model: onnx.ModelProto) -> None:
    """Refuse functions that call themselves, are not graphs, or call each other so often that they cannot be inlined.

    Raises:
        FileFormatError: A function calls itself, or the calls are too many or nested too deeply.
    """
    bodies = {(function.domain, function.name, function.overload): function for function in model.functions}
    if not bodies:
        return
    for function in model.functions:
        _check_body(function.name, function.node, {*function.input}, function.output)
    sizes: dict[_Key, int] = {}
    depth: dict[_Key, int] = {}
    for key in bodies:
        _measure(key, bodies, sizes, depth)
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
        for graph in _graphs(node):
            inner = {*known, *(value.name for value in (*graph.input, *graph.initializer))}
            _check_body(name, graph.node, inner, [value.name for value in graph.output])
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


def _graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _measure(
    start: _Key, bodies: dict[_Key, onnx.FunctionProto], sizes: dict[_Key, int], depth: dict[_Key, int]
) -> None:
    """Find the size of a function with everything that it calls, and how deep its calls nest; without recursion."""
    running: dict[_Key, None] = {}
    pending = [start]
    while pending:
        key = pending[-1]
        if key in sizes:
            pending.pop()
            continue
        called = [_identifier(node) for node in with_nested(bodies[key].node)]
        inner = [other for other in called if other in bodies]
        if key not in running:
            running[key] = None
            missing = [other for other in dict.fromkeys(inner) if other not in sizes]
            if circle := next((other for other in missing if other in running), None):
                raise FileFormatError(f"the function {circle[1]!r} of the model calls itself: it cannot be inlined")
            pending += missing
            continue
        del running[key]
        pending.pop()
        sizes[key] = len(called) + sum(sizes[other] for other in inner)
        depth[key] = 1 + max((depth[other] for other in inner), default=0)
        if depth[key] > CALL_DEPTH:
            raise FileFormatError(f"the calls of the model's functions are nested more than {CALL_DEPTH} deep")


def _identifier(node: onnx.NodeProto) -> _Key:
    return node.domain, node.op_type, node.overload

"""The size of a model after its functions are inlined, computed without inlining them."""

from __future__ import annotations

import onnx

from modelexport.core.limits import CALL_DEPTH, INLINED_NODES
from modelexport.errors import FileFormatError
from modelexport.files.tensors import with_nested

_Key = tuple[str, str, str]


def check_functions(model: onnx.ModelProto) -> None:
    """Refuse recursive functions, and functions whose calls would expand to too many nodes.

    Raises:
        FileFormatError: A function calls itself, or the calls are too many or nested too deeply.
    """
    bodies = {(function.domain, function.name, function.overload): function for function in model.functions}
    if not bodies:
        return
    sizes: dict[_Key, int] = {}
    depth: dict[_Key, int] = {}
    for key in bodies:
        _measure(key, bodies, sizes, depth)
    total = sum(1 + sizes.get(_identifier(node), 0) for node in with_nested(model.graph.node))
    if total > INLINED_NODES:
        raise FileFormatError(
            f"the model would have {total:,} nodes with its functions inlined, and at most {INLINED_NODES:,} are read"
        )


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

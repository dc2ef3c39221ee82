"""Equal FX nodes that the pass of ``torch.onnx`` that inserts promotions of types looks at once.

The pass runs each node on fake tensors, to know the types of the values that come next. If it left a node as it was,
and the node computed what the graph already says of its value, the same holds for every node with the same operator and
equal arguments: their values are taken from the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch.fx

from modelexport.capture.once.equal_calls import NotComparableError, comparable, described
from modelexport.pytorch.private_torch import OpOverload


def promoted_once(run: Callable[[Any, torch.fx.Node], Any]) -> Callable[[Any, torch.fx.Node], Any]:
    """The method that runs a node, once for equal nodes."""
    known: dict[Hashable, Hashable] = {}

    def run_node(interpreter: Any, node: torch.fx.Node) -> Any:
        key = _key(interpreter, node)
        if key is None:
            return run(interpreter, node)
        said = _said(node)
        if key in known and known[key] == said:
            return node.meta["val"]
        before = node.target, node.args, node.kwargs
        value = run(interpreter, node)
        if (node.target, node.args, node.kwargs) == before and _described(value) == said is not None:
            known[key] = said
        return value

    return run_node


def _key(interpreter: Any, node: torch.fx.Node) -> Hashable | None:
    """The operator and what is known of its arguments; ``None`` if that does not tell what the node computes."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    try:
        references = {one: described(interpreter.env[one]) for one in node.all_input_nodes}
        return node.target, comparable(node.args, references), comparable(node.kwargs, references)
    except (NotComparableError, KeyError):
        return None


def _said(node: torch.fx.Node) -> Hashable | None:
    return _described(node.meta["val"]) if "val" in node.meta else None


def _described(value: Any) -> Hashable | None:
    try:
        return described(value)
    except NotComparableError:
        return None

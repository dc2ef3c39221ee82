"""Equal FX nodes are looked at once by the pass of ``torch.onnx`` that inserts promotions of types.

The pass runs each node on fake tensors, to know the types of the values that come next. If it left a node as it was,
and the node computed what the graph already says of its value, the same holds for every node with the same operator and
equal arguments: their values are taken from the graph.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.fx

# Not public; tests/capture/test_templates.py is the canary.
from torch.onnx._internal.fx.passes.type_promotion import _TypePromotionInterpreter

from modelexport.capture.repeats import NotComparableError, comparable, described
from modelexport.core.attributes import attribute_set


@contextmanager
def promoted_once(*, reuse: bool = True) -> Iterator[None]:
    """Inside, ``torch.onnx.export`` runs equal nodes once to insert promotions. The graph is the same without."""
    if not reuse:
        yield
        return
    run = _TypePromotionInterpreter.run_node
    known: dict[Hashable, Hashable] = {}

    def run_node(self: Any, node: torch.fx.Node) -> Any:
        key = _key(self, node)
        if key is None:
            return run(self, node)
        said = _said(node)
        if key in known and known[key] == said:
            return node.meta["val"]
        before = node.target, node.args, node.kwargs
        value = run(self, node)
        if (node.target, node.args, node.kwargs) == before and _described(value) == said is not None:
            known[key] = said
        return value

    with attribute_set(_TypePromotionInterpreter, "run_node", run_node):
        yield


def _key(interpreter: Any, node: torch.fx.Node) -> Hashable | None:
    """The operator and what is known of its arguments; ``None`` if that does not tell what the node computes."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
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

"""Repairs around the pass of ``torch.onnx`` that inserts promotions of types, and equal FX nodes that it looks at once.

The pass runs each node on fake tensors, to know the types of the values that come next. If it left a node as it was,
and the node computed what the graph already says of its value, the same holds for every node with the same operator and
equal arguments: their values are taken from the graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.fx
from torch.export.graph_signature import TensorArgument

# Not public; tests/capture/test_templates.py is the canary.
from torch.onnx._internal.exporter import _core
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


@contextmanager
def outputs_converted_back() -> Iterator[None]:
    """Inside, the outputs of a graph have the types of the model's also where ``torch.onnx`` computes in another type.

    It computes a sum of half-precision numbers in float32 and converts the result back for all nodes that use it. The
    outputs of a graph are taken from the signature of its program, which still names the node before the conversion.
    """
    prepare = _core._prepare_exported_program_for_export

    def prepared(program: torch.export.ExportedProgram, **options: Any) -> torch.export.ExportedProgram:
        ready = prepare(program, **options)
        specs, returned = ready.graph_signature.output_specs, ready.graph.output_node().args[0]
        assert isinstance(returned, (tuple, list))
        for index, (spec, node) in enumerate(zip(specs, returned, strict=True)):
            if isinstance(spec.arg, TensorArgument) and isinstance(node, torch.fx.Node):
                specs[index] = dataclasses.replace(spec, arg=TensorArgument(node.name))
        return ready

    with attribute_set(_core, "_prepare_exported_program_for_export", prepared):
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

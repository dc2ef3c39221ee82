"""Read the module stack of a node from a name with scopes, as exporters of any framework write it.

The last part of a name is its operator, or what a tool calls it, and the parts before it name modules::

    model/dense_1/BiasAdd                                  tf2onnx, Keras
    StatefulPartitionedCall/model/dense/MatMul/Cast
    Inline_0__/encoder/fc/MatMul                           spox, inlined branches; a prefix of onnx.compose
    encoder.layer.0.attention.MatMul_3

Names of the TorchScript exporter (``/encoder/fc/MatMul``) have rules of their own (``torchscript_names.py``).
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import onnx_ir as ir

from modelexport.core.limits import CALL_DEPTH
from modelexport.core.owners import Evidence
from modelexport.graph.nodes import all_nodes
from modelexport.tagged.found_calls.recorded_stacks import CallSource, Found, StackEntry

_SEPARATORS = ("/", "::", "|", ".")
_SHARE = 0.5
"""The share of a file's nodes that have to have scopes under a separator for it to be one."""


def read_scoped_names(model: ir.Model, known: Container[ir.Node] = ()) -> dict[ir.Node, Found]:
    """The stacks of the nodes whose names have scopes, under the first separator under which most names form a tree.

    Args:
        known: The nodes whose stacks are known.
    """
    names = {node: _name(node) for node in all_nodes(model) if node.inputs}
    for separator in _SEPARATORS:
        parts = {node: tuple(filter(None, name.split(separator))) for node, name in names.items()}
        scopes = {node: scope for node, scope in _scopes(parts, separator).items() if scope}
        if len(scopes) >= _SHARE * len(names) and len(set(scopes.values())) > 1:
            return {node: _call_of_scope(scope) for node, scope in scopes.items() if node not in known}
    return {}


def _name(node: ir.Node) -> str:
    """The name of a node, or of its first output; the first of several that a converter joined."""
    name = node.name or next((value.name for value in node.outputs if value.name), "")
    return name.partition(";")[0]


def _scopes(parts: Mapping[ir.Node, tuple[str, ...]], separator: str) -> dict[ir.Node, tuple[str, ...]]:
    """The modules in the name of each node: the parts before the last, without those that name an operator."""
    names = set(parts.values())
    scopes = {}
    for node, (*modules, last) in ((node, segments) for node, segments in parts.items() if segments):
        if separator != "/" and not last.lower().startswith(node.op_type.lower()):
            continue  # such a separator is a part of many names
        scope = tuple(modules[:CALL_DEPTH])
        while scope and (scope in names or scope[-1].rstrip("_0123456789") == node.op_type):
            scope = scope[:-1]
        scopes[node] = scope
    return scopes


def _call_of_scope(modules: tuple[str, ...]) -> Found:
    escaped = [part.replace("@", "%40") for part in modules]  # which has a meaning in addresses
    stack = [StackEntry(".".join(escaped[:end])) for end in range(len(escaped) + 1)]
    return Found(tuple(stack), Evidence.DERIVED, CallSource.NODE_NAMES)

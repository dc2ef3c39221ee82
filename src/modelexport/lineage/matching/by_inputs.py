"""Nodes that have the operator and the inputs of one source node."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.lineage.attributes import may_be_equal
from modelexport.lineage.matching.state import Matching, computed_inputs


def match_by_inputs(state: Matching, node: ir.Node) -> None:
    """Match a node with the one source node that has its operator, its inputs and attributes that may be equal.

    Case: a ``MatMul`` that a quantizer left alone, but whose output it renamed to put something behind it.
    """
    if node in state.matches:
        return
    names = [state.names.get(value) for value in computed_inputs(node)]
    known = tuple(name for name in names if name is not None)
    if not known or len(known) < len(names):
        return
    candidates = [
        index
        for index in state.by_operation.get((node.op_identifier(), known), ())
        if not any(name in state.values for name in state.source.nodes[index].outputs)
        and may_be_equal(node.attributes.data, state.source.nodes[index].attributes)
    ]
    given = {state.names.get(value) for value in node.inputs if value is not None and value.is_initializer()} - {None}
    if len(candidates) > 1 and given:
        candidates = [index for index in candidates if given <= set(state.source.nodes[index].inputs)]
    if len(candidates) == 1:
        state.record_match(node, candidates[0])

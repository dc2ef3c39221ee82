"""Match nodes that got the name of a node after them which returned its input and was removed."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.lineage.matching.by_folding import has_new_parameter, is_parameter
from modelexport.lineage.matching.state import CHAIN, Matching, is_same_operation


def match_by_removal(state: Matching, node: ir.Node) -> None:
    """Match a node that gives the value of another operator with the node before that one which has its operator.

    Case: OnnxSlim removes a ``Pad`` of nothing, and the value before it gets the name of its result.
    """
    found = state.matches.get(node, [])
    nodes = state.source.nodes
    if len(found) != 1 or len(node.outputs) != 1 or node in state.approximate:
        return
    if nodes[found[0]].op == node.op_identifier():
        _match_the_one_before(state, node, found)
        return
    if has_new_parameter(state, node):
        return
    index = found[0]
    for _ in range(CHAIN):
        if nodes[index].op == node.op_identifier():
            return
        given = [name for name in nodes[index].inputs if name is not None]
        before = [name for name in given if name not in state.source.constant]
        if len(before) != 1 or before[0] not in state.source.producer:
            return
        if any(is_parameter(state.source.initializers.get(name)) for name in given):
            return  # it did not return its input
        index = state.source.producer[before[0]]
        if is_same_operation(node, nodes[index]) and not state.is_present(before[0]):
            found.append(index)
            state.values[before[0]] = node.outputs[0]
            return


def _match_the_one_before(state: Matching, node: ir.Node, found: list[int]) -> None:
    """Match a node with the one before the removed one, if both are of one operator and it takes what that one takes.

    Case: OnnxSlim removes the second of two ``Add``, of a parameter that is zero.
    """
    nodes, removed = state.source.nodes, state.source.nodes[found[0]]
    taken = [state.names.get(value) if value is not None else None for value in node.inputs]
    if taken == list(removed.inputs):
        return
    before = [name for name in removed.inputs if name is not None and name not in state.source.constant]
    if len(before) != 1 or before[0] not in state.source.producer:
        return
    index = state.source.producer[before[0]]
    same = is_same_operation(node, nodes[index]) and taken == list(nodes[index].inputs)
    if same and not state.is_present(before[0]):
        found[:] = [index]
        state.values[before[0]] = node.outputs[0]

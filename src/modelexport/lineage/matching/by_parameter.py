"""Match nodes with the source nodes whose parameters they use."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.graph.nodes import consumers
from modelexport.lineage.matching.matching_state import NODES_AROUND, REGION, Matching, is_same_operation


def match_by_parameter(state: Matching, node: ir.Node) -> None:
    """Match a node that uses a parameter, or a variant of it, with the source node that uses that parameter.

    Case: ``BiasGelu`` and ``SkipLayerNormalization`` of ``onnxruntime.transformers``, which contain the bias of the
    layer before, and ``Gemm`` nodes of OnnxSlim and onnxsim: their outputs have new names, their parameters those of
    the source. If several nodes use the parameter (a module that is called twice), the one that was lost near this node
    is used.
    """
    replaced = state.matches.get(node, [])
    if replaced and node not in state.approximate and node.op_identifier() == state.source.nodes[replaced[0]].op:
        return
    users = [index for index in _users_of_parameters(state, node) if index not in replaced]
    if not users or all(value is None or state.is_constant(value) for value in node.inputs):
        return
    state.parameters_of[node] = users
    first = max(users)
    before = state.source.nodes[first]
    if not replaced:
        if is_same_operation(node, before) and set(users) == {first} and state.shares_input(node, before):
            state.record_match(node, first)
            return
        state.approximate.add(node)
    if node.outputs[0] not in state.names:
        state.record_variant(before.outputs[0], node.outputs[0])
    state.matches[node] = sorted({*replaced, *users}, reverse=True)


def _users_of_parameters(state: Matching, node: ir.Node) -> list[int]:
    """The source nodes that use a node's parameters, one for each parameter for which it can be determined."""
    first_users: list[int] = []
    around: set[int] | None = None
    for value in node.inputs:
        if value is None or not value.is_initializer():
            continue
        name = state.names.get(value)
        if name is None or name not in state.source.initializers:
            continue
        users = state.source.users.get(name, ())
        if len(users) != 1 or len(value.uses()) != 1:
            around = _lost_around(state, node) if around is None else around
            users = state.users_among(around, name)
        if len(users) == 1:
            first_users.append(users[0])
    return first_users


def _lost_around(state: Matching, node: ir.Node) -> set[int]:
    """The lost source nodes near a node: before it, or before the next nodes that are matched."""
    known = list(state.matches.get(node, ()))
    pending, seen = [node], {node}
    while pending and not known and len(seen) <= NODES_AROUND:
        for user in consumers(pending.pop(), state.enclosing):
            known.extend(state.matches.get(user, ()))
            if user not in state.matches and user not in seen:
                seen.add(user)
                pending.append(user)
    return set(state.region(known, REGION))

"""Match fused nodes with the activation that one of their attributes names."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.lineage.matching.state import CHAIN, NEAR, Matching


def match_by_activation(state: Matching, node: ir.Node) -> None:
    """Match a fused node also with the operator that one of its attributes names, if that operator follows.

    Case: ONNX Runtime's ``Conv`` in its own layout, with ``activation: Relu`` (``ort-all`` on ResNet), produces the
    value of the ``Relu`` after the ``Conv``, with a name derived from the output of the ``Conv``.
    """
    if node not in state.approximate or not node.attributes.data:
        return
    named = {a.as_string() for a in node.attributes.data.values() if a.type == ir.AttributeType.STRING}
    nodes, users = state.source.nodes, state.source.users
    if not named or any(nodes[index].op[1] in named for index in state.region(state.matches[node], NEAR)):
        return
    index = state.matches[node][0]
    for _ in range(CHAIN):
        following = {user for output in nodes[index].outputs for user in users.get(output, ())}
        outputs = {output for user in following for output in nodes[user].outputs}
        if len(following) != 1 or not outputs.isdisjoint(state.variants):
            return
        index = following.pop()
        if nodes[index].op[1] in named:
            state.matches[node].insert(0, index)
            state.record_variant(nodes[index].outputs[0], node.outputs[0])
            return

"""Match nodes with those after or before them that are gone: folded into parameters, removed, or fused in."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.graph.snapshot import SourceNode
from modelexport.lineage.matching.matching_state import (
    CHAIN,
    NODES_AROUND,
    SKIPPED_WHEN_MATCHING,
    Matching,
    computed_inputs,
    is_same_operation,
)

_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def match_by_folding(state: Matching, node: ir.Node) -> None:
    """Match a node with new parameters also with the node after it that is gone with all its parameters.

    Case: OnnxSim folds a ``BatchNormalization`` into the ``Conv`` before it, and OnnxSlim a scale into a ``Gemm`` with
    a ``Reshape`` behind it; the value that they give keeps the name of what the ``Conv`` gave.
    """
    value = node.outputs[0] if len(node.outputs) == 1 and state.new_initializers else None
    name = state.names.get(value) if value is not None else None
    if value is None or name is None or node not in state.matches or value.name != name:
        return
    chain = _with_new_parameters(state, node)
    for _ in range(CHAIN if chain else 0):
        following = state.source.users.get(name, ())
        index = next(iter(following)) if len(following) == 1 else None
        if index is None or not _is_folded(state, index, name):
            return
        if any(user.op_identifier() == state.source.nodes[index].op for user in value.consumers()):
            return  # it is still there, with new parameters
        state.values.pop(name, None)
        name = state.source.nodes[index].outputs[0]
        state.record_value(name, value)
        for matched in chain:
            state.matches[matched].insert(0, index)


def has_new_parameter(state: Matching, node: ir.Node) -> bool:
    """Whether a node uses a parameter that the source has not."""
    new = state.new_initializers
    return bool(new) and any(
        value is not None and value in new and could_be_parameter(value.const_value) for value in node.inputs
    )


def _with_new_parameters(state: Matching, node: ir.Node) -> list[ir.Node]:
    """The node and those before it, up to the one that has parameters which the source has not; nothing if none has."""
    chain = []
    for _ in range(CHAIN):
        if node not in state.matches:
            return []
        chain.append(node)
        if has_new_parameter(state, node):
            return chain
        before = computed_inputs(node)
        producer = before[0].producer() if len(before) == 1 and len(before[0].uses()) == 1 else None
        if producer is None or node.op_type not in SKIPPED_WHEN_MATCHING:
            return []
        node = producer
    return []


def _is_folded(state: Matching, index: int, name: str) -> bool:
    """Whether a source node computes with one value and parameters, and is gone with all of them."""
    before = state.source.nodes[index]
    constants = [constant for constant in before.inputs if constant is not None and constant != name]
    return (
        len(before.outputs) >= 1
        and not any(state.is_present(output) for output in before.outputs)
        and bool(constants)
        and all(constant in state.source.constant and not state.is_present(constant) for constant in constants)
        and any(could_be_parameter(state.source.initializers.get(constant)) for constant in constants)
    )


def could_be_parameter(tensor: ir.TensorProtocol | None) -> bool:
    """Whether a tensor may be a parameter: more than one floating-point number."""
    return tensor is not None and tensor.dtype in _FLOATS and tensor.size > 1


def match_by_removal(state: Matching, node: ir.Node) -> None:
    """Match a node that gives the value of another operator with the node before that one which has its operator.

    Case: OnnxSlim removes a ``Pad`` of nothing, and the value before it gets the name of its result.
    """
    matches = state.matches.get(node, [])
    nodes = state.source.nodes
    if len(matches) != 1 or len(node.outputs) != 1 or node in state.approximate:
        return
    if nodes[matches[0]].op == node.op_identifier():
        _match_the_one_before(state, node, matches)
        return
    if has_new_parameter(state, node):
        return
    index = matches[0]
    for _ in range(CHAIN):
        taken = [name for name in nodes[index].inputs if name is not None]
        before = _only_input(state, nodes[index])
        parameters = any(
            could_be_parameter(state.source.initializers.get(name)) for name in taken
        )  # not its input unchanged
        if nodes[index].op == node.op_identifier() or before is None or parameters:
            return
        index = state.source.producer[before]
        if is_same_operation(node, nodes[index]) and not state.is_present(before):
            matches.append(index)
            state.values[before] = node.outputs[0]
            return


def _match_the_one_before(state: Matching, node: ir.Node, matches: list[int]) -> None:
    """Match a node with the one before the removed one, if both are of one operator and it takes what that one takes.

    Case: OnnxSlim removes the second of two ``Add``, of a parameter that is zero.
    """
    nodes, removed = state.source.nodes, state.source.nodes[matches[0]]
    taken = [state.names.get(value) if value is not None else None for value in node.inputs]
    if taken == list(removed.inputs):
        return
    if (before := _only_input(state, removed)) is None:
        return
    index = state.source.producer[before]
    same = is_same_operation(node, nodes[index]) and taken == list(nodes[index].inputs)
    if same and not state.is_present(before):
        matches[:] = [index]
        state.values[before] = node.outputs[0]


def _only_input(state: Matching, node: SourceNode) -> str | None:
    """The only input of a source node that is not a constant, if a node produces it."""
    names = [name for name in node.inputs if name is not None and name not in state.source.constant]
    return names[0] if len(names) == 1 and names[0] in state.source.producer else None


def match_by_activation(state: Matching, node: ir.Node) -> None:
    """Match a fused node also with the operator that one of its attributes names, if that operator follows.

    Case: ONNX Runtime's ``Conv`` in its own layout, with ``activation: Relu`` (``ort-all`` on ResNet), produces the
    value of the ``Relu`` after the ``Conv``, with a name derived from the output of the ``Conv``.
    """
    if node not in state.approximate or not node.attributes.data:
        return
    named = {a.as_string() for a in node.attributes.data.values() if a.type == ir.AttributeType.STRING}
    nodes, users = state.source.nodes, state.source.users
    if not named or any(nodes[index].op[1] in named for index in state.region(state.matches[node], NODES_AROUND)):
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

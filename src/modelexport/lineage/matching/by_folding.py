"""Match nodes into whose parameters a tool folded those of the node after them."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.lineage.matching.state import CHAIN, MOVES, Matching, computed_inputs

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
        for one in chain:
            state.matches[one].insert(0, index)


def has_new_parameter(state: Matching, node: ir.Node) -> bool:
    """Whether a node uses a parameter that the source has not."""
    new = state.new_initializers
    return bool(new) and any(
        value is not None and value in new and is_parameter(value.const_value) for value in node.inputs
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
        if producer is None or node.op_type not in MOVES:
            return []
        node = producer
    return []


def _is_folded(state: Matching, index: int, name: str) -> bool:
    """Whether a source node computes with one value and parameters, and is gone with all of them."""
    before = state.source.nodes[index]
    constants = [one for one in before.inputs if one is not None and one != name]
    return (
        len(before.outputs) >= 1
        and not any(state.is_present(output) for output in before.outputs)
        and bool(constants)
        and all(one in state.source.constant and not state.is_present(one) for one in constants)
        and any(is_parameter(state.source.initializers.get(one)) for one in constants)
    )


def is_parameter(tensor: ir.TensorProtocol | None) -> bool:
    """Whether a tensor may be a parameter: more than one floating-point number."""
    return tensor is not None and tensor.dtype in _FLOATS and tensor.size > 1

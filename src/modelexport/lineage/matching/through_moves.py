"""Match the node that computes a value if the output of a following node has the value's name."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.lineage.matching.by_fusion import find_core
from modelexport.lineage.matching.state import CHAIN, Matching, computed_inputs


def match_through_moves(state: Matching, node: ir.Node) -> None:
    """Match the node that computes a value if the node whose output has the value's name only passes it on.

    Case: a tool inserts a node after another (a ``Cast``, a ``Transpose``), gives its output the name of the value, and
    renames the value before it: ``quantize-dynamic`` on GPT-2's ``lm_head``, onnxsim on Whisper.
    """
    names = state.names
    for value in node.inputs:
        if value not in names and value is not None:
            break
    else:
        return  # as nearly always
    for index in list(state.matches.get(node, ())):
        before = state.source.nodes[index]
        if node not in state.approximate and node.op_identifier() == before.op:
            continue
        unknown = state.unknown_inputs(node)
        if len(unknown) != 1 or unknown[0][1] in names or find_core(state, node, index) is not None:
            continue
        value = unknown[0][1]
        for _ in range(CHAIN):
            producer = value.producer()
            if producer is None or producer in state.matches:
                break
            if producer.op_identifier() == before.op and state.shares_input(producer, before):
                state.matches[producer] = [index]
                if len(producer.outputs) == len(before.outputs):
                    names.update(zip(producer.outputs, before.outputs, strict=True))
                break
            inputs = computed_inputs(producer)
            if len(inputs) != 1:
                break
            value = inputs[0]

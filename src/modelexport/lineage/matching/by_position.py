"""Match the producers of a matched node's inputs: its input in the position of a source value is that value."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from modelexport.graph.nodes import PLAIN_TYPES
from modelexport.graph.snapshot import SourceNode
from modelexport.lineage.matching.matching_state import Matching


def match_by_position(state: Matching, node: ir.Node) -> None:
    """Match the producers of a known node's inputs if their names are not those of the source.

    Cases: values that a tool renamed; fused nodes, whose value has a new name; and, for values that have names of the
    source themselves, those of :func:`_settle_names`.
    """
    if node in state.approximate:
        return
    for index in list(state.matches.get(node, ())):
        before = state.source.nodes[index]
        if node.op_identifier() == before.op:
            _match_inputs(state, node, before)


def _match_inputs(state: Matching, node: ir.Node, before: SourceNode) -> None:
    if len(node.inputs) != len(before.inputs) or not may_be_equal(node.attributes.data, before.attributes):
        return
    differing = [
        (value, name)
        for value, name in zip(node.inputs, before.inputs, strict=True)
        if value is not None and name is not None and state.names.get(value) != name
    ]
    for value, name in differing:
        if value.is_initializer():
            _match_initializer(state, value, name)
        elif name in state.source.producer and name not in state.values:
            _match_computed(state, value, name, alone=len(differing) == 1)


def _match_initializer(state: Matching, value: ir.Value, name: str) -> None:
    """Match an initializer in the position of another.

    Cases: onnxscript merges equal initializers, OnnxSlim renames them.
    """
    tensor = state.source.initializers.get(name)
    if tensor is None or value.const_value is None or tensor.size != value.const_value.size:
        return
    if value not in state.names:
        state.names[value] = name
        state.values.setdefault(name, value)
    elif name not in state.values and name not in state.merged[value]:
        state.merged[value].append(name)


def _match_computed(state: Matching, value: ir.Value, name: str, *, alone: bool) -> None:
    """Match a computed value, or an input of the graph, in the position of a source value that is not known yet.

    Args:
        alone: Whether every other input of the node is that of the source.
    """
    producer = value.producer()
    if producer is None:
        if alone and state.shape_of(value) == state.source.shape_of(name):
            state.values[name] = value  # the source nodes between the two returned their inputs, and were removed
    elif producer in state.approximate or value not in state.names:
        state.record_output(producer, value, state.source.producer[name], name)
    elif name not in state.variants:
        _settle_names(state, value, producer, name, alone=alone)


def _settle_names(state: Matching, value: ir.Value, producer: ir.Node, name: str, *, alone: bool) -> None:
    """Match a value that has the name of one source value in the position of another. There are three cases.

    1. The name is the same but the value is not: ONNX Runtime folds a ``BatchNormalization`` into a ``Conv``, whose
       output keeps its name but is now the output of the normalization.
    2. Equal nodes were merged, as ONNX Runtime does: the node replaces both.
    3. Source nodes that returned their inputs (``Identity``, ``Cast`` to the same type) were removed.
    """
    index = state.source.producer[name]
    replaced = state.matches.get(producer, [])
    first = state.source.nodes[replaced[0]] if replaced else None
    other = state.source.nodes[index]
    if first is not None and _takes_new_parameter(state, producer, first):
        state.values.pop(state.names[value], None)
        state.record_output(producer, value, index, name)
    elif first is not None and first.op == other.op == producer.op_identifier():
        if are_equal(first.attributes, other.attributes) or may_be_equal(producer.attributes.data, other.attributes):
            if index not in replaced:
                replaced.append(index)
            state.values[name] = value
    elif alone and state.source.shape_of(name) == state.shape_of(value):
        state.values[name] = value


def _takes_new_parameter(state: Matching, node: ir.Node, before: SourceNode) -> bool:
    """Whether a node uses an initializer without a source name where the source node had an initializer or nothing."""
    return any(
        value.is_initializer()
        and value not in state.names
        and (i >= len(before.inputs) or before.inputs[i] is None or before.inputs[i] in state.source.initializers)
        for i, value in enumerate(node.inputs)
        if value is not None
    )


_BY_IDENTITY = (ir.AttributeType.TENSOR, ir.AttributeType.GRAPH, ir.AttributeType.TENSORS, ir.AttributeType.GRAPHS)


def are_equal(first: Mapping[str, ir.Attr], second: Mapping[str, ir.Attr]) -> bool:
    """Whether attributes are known to be equal; tensors and graphs only if they are the same object."""
    return first.keys() == second.keys() and all(
        attribute is second[name] or (attribute.type not in _BY_IDENTITY and attribute.value == second[name].value)
        for name, attribute in first.items()
    )


def may_be_equal(first: Mapping[str, ir.Attr], second: Mapping[str, ir.Attr]) -> bool:
    """Whether attributes do not contradict each other: a node may omit attributes that have their default value."""
    return all(
        attribute.type != second[name].type or attribute.value == second[name].value
        for name, attribute in first.items()
        if name in second and attribute.type in PLAIN_TYPES and not attribute.is_ref()
    )

"""Match values that kept their names, and values whose names are derived from source names.

Cases: every tool keeps most names of values. Quantizers, ONNX Runtime's layouts and its transformer optimizer derive
the names of new values: ``linear_3_quantized``, ``reorder_token_13``, ``node_MatMul_46/MatMulAddFusion``.
"""

from __future__ import annotations

import onnx_ir as ir

from modelexport.lineage.matching.matching_state import NODES_AROUND, Matching


def name_given_values(state: Matching) -> None:
    """Record the graph's inputs and initializers with a name of the source, or with a name derived from one.

    Case: ``weight_quantized``, ``weight_scale`` and ``weight_zero_point`` of a quantizer are variants of ``weight``.
    Not of a value that is computed from the inputs: OnnxSlim names the parameters of a folded ``Conv``
    ``getitem_2_weight``, after the value that it gives.
    """
    source = state.source
    for value in (*state.changed.graph.inputs, *state.initializers):
        name = value.name or ""
        if name in source.names:
            state.record_value(name, value)
        elif (original := state.originals.find(name)) is not None and (
            original not in source.producer or original in source.constant
        ):
            state.record_variant(original, value)


def match_by_name(state: Matching, node: ir.Node) -> None:
    """Match a node that produces a value with a name of the source with the source node that produces this value.

    Case: every node that a tool did not change, and every fused node that produces the last value of the fused nodes.
    With several outputs the source node that comes last in the graph is used: the others were fused into this one.
    """
    producer = state.source.producer
    if makers := [producer[name] for value in node.outputs if (name := value.name or "") in producer]:
        state.record_match(node, max(makers))


def match_by_derived_name(state: Matching, node: ir.Node) -> None:
    """Match a node that is named, or whose output is named, after a value of the source: it produces a variant of it.

    Case: ``QuantizeLinear`` that produces ``linear_3_quantized``. The name is used only if the node uses the value, or
    something that the value is computed from: two tools may number their values in the same way, so ``_inlfunc_linear``
    of one layer may look as if it were named after the ``linear`` of another.
    """
    if node in state.matches:
        return
    names, producer = state.names, state.source.producer
    taken: set[str] | None = None
    for position, value in enumerate(node.outputs):
        if value in names:
            continue
        own_names = (value.name, node.name) if position == 0 else (value.name,)
        for original in state.originals.candidates(*own_names):
            index = producer.get(original)
            if index is None:  # named after an input or initializer: it belongs to the nodes that it leads to
                if any(names.get(used) == original for used in node.inputs if used is not None):
                    state.record_variant(original, value)
                    break
                continue
            if taken is None:
                taken = _telling(state, node)
            if _takes_part_of(state, taken, original, index):
                state.record_variant(original, value)
                state.matches.setdefault(node, [index])
                state.approximate.add(node)
                break


def _telling(state: Matching, node: ir.Node) -> set[str]:
    """The source values that a node takes, without constants that several nodes use: these do not identify it."""
    constant, users, names = state.source.constant, state.source.users, state.names
    taken = set()
    for value in node.inputs:
        name = names.get(value) or state.passed_on(value)  # type: ignore[arg-type]  # None has no name
        if name is not None and (name not in constant or len(users.get(name, ())) == 1):
            taken.add(name)
    return taken


def _takes_part_of(state: Matching, taken: set[str], original: str, index: int) -> bool:
    """Whether these are a source value, or one nearby that it is computed from."""
    if not taken:
        return False
    if original in taken or not taken.isdisjoint(state.source.nodes[index].inputs):  # as nearly always
        return True
    return any(not taken.isdisjoint(before.inputs) for before in state.behind(index, NODES_AROUND))

"""Match the producers of a fused node's inputs: it uses the inputs of the source nodes inside it."""

from __future__ import annotations

import re
from functools import cache

import onnx
import onnx_ir as ir

from modelexport.lineage.matching.matching_state import CHAIN, REGION, SKIPPED_WHEN_MATCHING, Matching, computed_inputs


def match_by_fusion(state: Matching, node: ir.Node) -> None:
    """Match the producers of a fused node's inputs if their names are not those of the source.

    Case: the ``QLinearConv`` of a quantizer uses the input of the ``Conv`` inside it; the node before it produces that
    value under a new name.
    """
    matched = state.matches.get(node)
    if matched is None or not _may_have_core(state, node):
        return
    unknown = state.unknown_inputs(node)
    if not unknown:
        return
    for index in list(matched):
        if node not in state.approximate and node.op_identifier() == state.source.nodes[index].op:
            continue
        core = find_core(state, node, index) if unknown else None
        if core is None:
            continue
        taken = _computed_names(state, core)
        positions = state.source.nodes[core].inputs
        for position, value in unknown:
            name = taken[0] if len(taken) == 1 else positions[position] if position < len(positions) else None
            producer = value.producer()
            if producer is None or name not in state.source.producer or core in state.matches.get(producer, ()):
                continue
            made_at, name = _before_moves(state, producer, name)
            if name not in state.values:
                state.record_output(producer, value, made_at, name)
        unknown = state.unknown_inputs(node)


def find_core(state: Matching, node: ir.Node, index: int) -> int | None:
    """The source node whose inputs a fused node has: its operator is in the fused one's name, or it has its parameter.

    Args:
        index: A source node that the fused one replaces; the search goes back from there.
    """
    if not _may_have_core(state, node):
        return None
    inside, parameters_of = _operators_in(node.op_type), state.parameters_of.get(node, ())
    held: dict[str, int] = {}
    first: int | None = None
    count: int | None = None
    for core in state.region([index], REGION):
        operator = state.source.nodes[core].op[1]
        if operator not in inside and core not in parameters_of:
            continue
        if count is None:
            count = len(computed_inputs(node))
        if len(_computed_names(state, core)) != count:
            continue
        if operator in inside:
            held.setdefault(operator, core)
        if first is None and count == 1 and core in parameters_of:
            first = core
    return min(held.values()) if held else first


def _may_have_core(state: Matching, node: ir.Node) -> bool:
    """Whether the source may have the node's operator inside it, or the node has a parameter of the source."""
    return node in state.parameters_of or not _operators_in(node.op_type).isdisjoint(state.operators)


def _computed_names(state: Matching, index: int) -> list[str]:
    """The inputs of a source node, without constants."""
    return [name for name in state.source.nodes[index].inputs if name and name not in state.source.constant]


def _before_moves(state: Matching, node: ir.Node, name: str) -> tuple[int, str]:
    """The source value that a node produces if the expected value may be the same in another shape, layout or type.

    Case: a quantizer removes the ``Transpose`` between two nodes, so the second uses the output of the first.
    """
    made_at = state.source.producer[name]
    for _ in range(CHAIN):
        before = state.source.nodes[made_at]
        moved = before.inputs[0] if before.inputs else None
        if (
            before.op[1] not in SKIPPED_WHEN_MATCHING
            or before.op == node.op_identifier()
            or moved not in state.source.producer
        ):
            break
        if moved is None or moved in state.values:
            break
        made_at, name = state.source.producer[moved], moved
    return made_at, name


@cache
def _operators_in(op_type: str) -> frozenset[str]:
    """The standard operators in the name of another operator: ``MatMul`` in ``FusedMatMul``, not ``Mul``."""
    inside = {name for name in _standard_operators() if name in op_type}
    return frozenset(name for name in inside if not any(name in other for other in inside - {name}))


@cache
def _standard_operators() -> frozenset[str]:
    """The names of ONNX's operators but the quantized ones: the lists of their schemas takes 3 ms to make."""
    names = {schema.name for schema in onnx.defs.get_all_schemas()}
    return frozenset(name for name in names if not re.match("QLinear|.*Integer", name))

"""Nodes that have to get one method together, from the call tree and the graph, never from names.

A group is made of nodes with a constant weight (``MatMul``, ``Gemm``, ``Conv``, ``Gather``, recurrent layers) that

- use one parameter: calls of one module, tied weights, two layouts of one tensor;
- or take one input and lead into one attention: its query, key and value, which runtimes fuse only if they are alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

import msgspec
import onnx
import onnx_ir as ir

from modelexport.graph.node_owners import owner_of
from modelexport.graph.parameter_plans import parameter_plan
from modelexport.graph.weighted_operators import data_of, row_of
from modelexport.tagged.file import TaggedFile
from modelexport.tools.quantize.weights_behind import weight_behind

_PRODUCTS = ("MatMul", "FusedMatMul", "Einsum")
"""Operators that attentions multiply two values with that are not constant."""

T = TypeVar("T")
Why = Literal["alone", "weight", "attention"]


class MethodGroup(msgspec.Struct, frozen=True):
    """Nodes that get one method."""

    nodes: tuple[str, ...]
    """Names of nodes, in the order of the graph."""
    calls: tuple[str, ...]
    """The addresses of the calls that own them, in the order of the graph."""
    weights: tuple[str, ...]
    """The initializers that they hold, each once."""
    why: Why
    """``weight``: they use one parameter; ``attention``: they are the query, key and value of one attention."""


def find_groups(tagged: TaggedFile) -> list[MethodGroup]:
    """Every node with a constant weight, together with the nodes that have to get the same method; graph order."""
    nodes = weighted_nodes(tagged.model)
    by_weight: dict[str, list[ir.Node]] = defaultdict(list)
    for node, weight in nodes.items():
        plan = parameter_plan(weight)
        for key in plan.keys if plan is not None else [f"\0{weight.name}"]:
            by_weight[key].append(node)
    attentions = [projections for projections in _attentions(tagged.model, nodes) if len(projections) > 1]
    of_attentions = {node for projections in attentions for node in projections}
    groups = []
    for together in merged([*([node] for node in nodes), *by_weight.values(), *attentions]):
        why: Why = "alone" if len(together) == 1 else "weight" if of_attentions.isdisjoint(together) else "attention"
        owners = (owner_of(node) for node in together)
        calls = dict.fromkeys(str(call) for owner in owners if owner is not None for call in owner.calls)
        names = tuple(node.name or "" for node in together)
        weights = dict.fromkeys(nodes[node].name or "" for node in together)
        groups.append(MethodGroup(nodes=names, calls=tuple(calls), weights=tuple(weights), why=why))
    return groups


def merged(lists: Iterable[Sequence[T]]) -> list[list[T]]:
    """Lists that have an element in common become one; their elements keep the order in which each came first."""
    list_of: dict[T, list[T]] = {}
    for elements in lists:
        met = {id(list_of[element]): list_of[element] for element in elements if element in list_of}
        whole = [*dict.fromkeys(element for part in (*met.values(), elements) for element in part)]
        list_of.update(dict.fromkeys(whole, whole))
    ordered: dict[int, list[T]] = {}
    for element, whole in list_of.items():
        ordered.setdefault(id(whole), []).append(element)
    return list(ordered.values())


def weighted_nodes(model: ir.Model) -> dict[ir.Node, ir.Value]:
    """The nodes of the main graph with a constant weight of floating-point numbers, to its initializer."""
    weights: dict[ir.Node, ir.Value] = {}
    for node in model.graph:
        row = row_of(node)
        if row is None or row.weight >= len(node.inputs):
            continue
        weight = weight_behind(node.inputs[row.weight]) if weight_behind(node.outputs[0]) is None else None
        tensor = weight.const_value if weight is not None else None
        if weight is not None and tensor is not None and tensor.dtype.is_floating_point() and len(tensor.shape) > 1:
            weights[node] = weight
    return weights


def _attentions(model: ir.Model, weighted: Mapping[ir.Node, ir.Value]) -> Iterator[list[ir.Node]]:
    """The projections of each attention that take the same value.

    An attention is a product of two values that are not constant, or a node that takes three of them; its projections
    are the nodes with a weight from which these come without another such node in between.
    """
    behind: dict[ir.Node, frozenset[ir.Node]] = {}
    for node in model.graph:  # producers first
        projections_before: set[ir.Node] = set()
        active = 0
        for value in node.inputs:
            producer = value.producer() if value is not None else None
            if producer is None:
                continue
            before = frozenset([producer]) if producer in weighted else behind.get(producer, frozenset())
            active += bool(before)
            projections_before |= before
        behind[node] = frozenset(projections_before)
        if node in weighted or active < 2 or not (node.op_type in _PRODUCTS or _is_fused_attention(node)):
            continue
        by_input: dict[ir.Value | None, list[ir.Node]] = defaultdict(list)
        for projection in weighted:
            if projection in projections_before:
                by_input[data_of(projection)].append(projection)
        yield from by_input.values()


def _is_fused_attention(node: ir.Node) -> bool:
    """Whether a node is an operator of a whole attention: of a query, a key and a value; ONNX Runtime has several."""
    if not onnx.defs.has(node.op_type, domain=node.domain):
        return node.op_type.endswith("Attention")
    schema = onnx.defs.get_schema(node.op_type, domain=node.domain)
    return {"Q", "K", "V"} <= {parameter.name for parameter in schema.inputs}

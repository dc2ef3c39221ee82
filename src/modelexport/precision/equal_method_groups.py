"""Nodes that have to get one method together, from the call tree and the graph, never from names.

A group is made of nodes with a constant weight (``MatMul``, ``Gemm``, ``Conv``, ``Gather``, recurrent layers) that

- use one parameter: calls of one module, tied weights, two layouts of one tensor;
- or take one input and lead into one attention: its query, key and value, which runtimes fuse only if they are alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec
import onnx
import onnx_ir as ir

from modelexport.graph.hidden_weights import bind_tensors
from modelexport.graph.node_owners import owner_of
from modelexport.graph.parameter_plans import parameter_plan
from modelexport.precision.cut_pieces import MOVES, weight_behind
from modelexport.tagged.file import TaggedFile

WEIGHTS: Mapping[str, int] = {
    "MatMul": 1,
    "FusedMatMul": 1,
    "Gemm": 1,
    "Conv": 1,
    "ConvTranspose": 1,
    "Gather": 0,
    "LSTM": 1,
    "GRU": 1,
    "RNN": 1,
    "Attention": 1,
}
"""Operators to the position of the input that holds their weight."""

_PRODUCTS = ("MatMul", "FusedMatMul", "Einsum")

Why = Literal["alone", "weight", "attention"]


class Group(msgspec.Struct, frozen=True):
    """Nodes that get one method."""

    nodes: tuple[str, ...]
    """Names of nodes, in the order of the graph."""
    calls: tuple[str, ...]
    """The addresses of the calls that own them, in the order of the graph."""
    operators: tuple[str, ...]
    """The operator of each node."""
    weights: tuple[str, ...]
    """The initializers that they hold, each once."""
    elements: int
    """Elements of the weights."""
    why: Why
    """``weight``: they use one parameter; ``attention``: they are the query, key and value of one attention."""


def find_groups(tagged: TaggedFile) -> list[Group]:
    """Every node with a constant weight, together with the nodes that have to get the same method; graph order."""
    nodes = weighted_nodes(tagged.model)
    joined: dict[ir.Node, ir.Node] = {node: node for node in nodes}
    why: dict[ir.Node, Why] = {}

    def root(node: ir.Node) -> ir.Node:
        while joined[node] is not node:
            node = joined[node]
        return node

    def join(together: list[ir.Node], reason: Why) -> None:
        first = root(together[0])
        for node in together[1:]:
            if (other := root(node)) is not first:
                joined[other] = first
        if len(together) > 1:
            why[first] = reason

    by_weight: dict[str, list[ir.Node]] = defaultdict(list)
    for node, weight in nodes.items():
        plan = parameter_plan(weight)
        for key in plan.keys if plan is not None else [f"\0{weight.name}"]:
            by_weight[key].append(node)
    for together in by_weight.values():
        join(together, "weight")
    for together in _attentions(tagged.model, nodes):
        join(together, "attention")
    members: dict[ir.Node, list[ir.Node]] = defaultdict(list)
    for node in nodes:
        members[root(node)].append(node)
    return [_group(together, nodes, why.get(first, "alone")) for first, together in members.items()]


def weighted_nodes(model: ir.Model) -> dict[ir.Node, ir.Value]:
    """The nodes of the main graph with a constant weight of floating-point numbers, to its initializer."""
    weights: dict[ir.Node, ir.Value] = {}
    for node in model.graph:
        place = WEIGHTS.get(node.op_type)
        if place is None or place >= len(node.inputs):
            continue
        weight = weight_behind(node.inputs[place]) if weight_behind(node.outputs[0]) is None else None
        tensor = weight.const_value if weight is not None else None
        if weight is not None and tensor is not None and tensor.dtype.is_floating_point() and len(tensor.shape) > 1:
            weights[node] = weight
    return weights


def hold_weights(model: ir.Model) -> None:
    """Make weights initializers that are ``Constant`` nodes, or inputs too (all are up to IR version 3), in place."""
    graph = model.graph
    if model.ir_version < _INPUTS_ALONE:
        graph.inputs[:] = [value for value in graph.inputs if not value.is_initializer()]
        model.ir_version = _INPUTS_ALONE
    for node in [node for node in graph if node.op_type in WEIGHTS and len(node.inputs) > WEIGHTS[node.op_type]]:
        value = node.inputs[WEIGHTS[node.op_type]]
        while value is not None and (mover := value.producer()) is not None and mover.op_type in MOVES:
            value = mover.inputs[0]
        constant = value.producer() if value is not None else None
        if value is None or constant is None or constant.op_type != "Constant" or value.is_graph_output():
            continue
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is not None and tensor.dtype.is_floating_point() and len(tensor.shape) > 1:
            held = ir.Value(name=value.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()))
            bind_tensors({held: tensor})
            ir.convenience.replace_all_uses_with(value, held)
            graph.remove(constant, safe=True)
            graph.register_initializer(held)


_INPUTS_ALONE = 4
"""The IR version from which initializers need not be inputs."""


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
                by_input[projection.inputs[1 - WEIGHTS[projection.op_type]]].append(projection)
        yield from by_input.values()


def _is_fused_attention(node: ir.Node) -> bool:
    """Whether a node is an operator of a whole attention: of a query, a key and a value; ONNX Runtime has several."""
    if not onnx.defs.has(node.op_type, domain=node.domain):
        return node.op_type.endswith("Attention")
    schema = onnx.defs.get_schema(node.op_type, domain=node.domain)
    return {"Q", "K", "V"} <= {parameter.name for parameter in schema.inputs}


def _group(together: list[ir.Node], weights: Mapping[ir.Node, ir.Value], why: Why) -> Group:
    owners = (owner_of(node) for node in together)
    calls = dict.fromkeys(str(call) for owner in owners if owner is not None for call in owner.calls)
    held = {weights[node].name or "": weights[node] for node in together}
    return Group(
        nodes=tuple(node.name or "" for node in together),
        calls=tuple(calls),
        operators=tuple(node.op_type for node in together),
        weights=tuple(held),
        elements=sum(value.const_value.size for value in held.values() if value.const_value is not None),
        why=why,
    )

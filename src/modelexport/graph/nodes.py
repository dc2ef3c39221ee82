"""Walking over an ``onnx_ir`` model, nested graphs and functions included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import onnx
import onnx_ir as ir

IDENTITY: ir.OperatorIdentifier = ("", "Identity", "")
CONTRIBUTED = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""
GROUP_QUERY_ATTENTION = "GroupQueryAttention"

PLAIN_TYPES = frozenset(ir.AttributeType[name] for name in ("INT", "INTS", "FLOAT", "FLOATS", "STRING", "STRINGS"))
"""Attributes that are numbers and texts, which can be compared and copied by value."""


def all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Every node of a model: of the graph, of nested graphs (after their enclosing node) and of functions."""
    return chain(nodes_of(model.graph), *map(nodes_of, model.functions.values()))


def is_cached_attention(node: ir.Node) -> bool:
    """Whether a node is ONNX Runtime's attention that appends to a cache, ``GroupQueryAttention``."""
    return node.op_identifier()[:2] == (CONTRIBUTED, GROUP_QUERY_ATTENTION)


def nodes_of(graph: ir.Graph | ir.Function) -> Iterator[ir.Node]:
    """The nodes of a graph and of the graphs nested in it, these after their enclosing node."""
    # onnx_ir has such an iterator, for any order and depth of graphs, but it is five times slower.
    for node in graph:
        yield node
        if node.attributes.data:
            for nested in nested_graphs(node):
                yield from nodes_of(nested)


def with_nested(node: ir.Node) -> Iterator[ir.Node]:
    """A node and the nodes of its nested graphs."""
    yield node
    for graph in nested_graphs(node):
        yield from nodes_of(graph)


def all_graphs(model: ir.Model) -> Iterator[ir.Graph]:
    """The graph of a model and all graphs nested in it, outer before inner; not the graphs in functions."""
    yield from _with_graphs_inside(model.graph)


def _with_graphs_inside(graph: ir.Graph) -> Iterator[ir.Graph]:
    yield graph
    for node in graph:
        for nested in nested_graphs(node):
            yield from _with_graphs_inside(nested)


def is_sorted(graph: ir.Graph) -> bool:
    """Whether each node comes after the nodes that it depends on, in nested graphs, too."""
    return _is_sorted(graph, set())


def _is_sorted(graph: ir.Graph, before: set[ir.Node]) -> bool:
    for node in graph:
        for value in node.inputs:
            if value is not None and (producer := value.producer()) is not None and producer not in before:
                return False
        if node.attributes.data and not all(_is_sorted(nested, before) for nested in nested_graphs(node)):
            return False
        before.add(node)
    return True


def nested_graphs(node: ir.Node) -> Sequence[ir.Graph]:
    """The nested graphs of a node: branches and loop bodies."""
    graphs: list[ir.Graph] = []
    for attribute in node.attributes.data.values():
        if (kind := attribute.type) is _GRAPH or kind is _GRAPHS:
            graphs += graphs_of(attribute)
    return graphs


def graphs_of(attribute: ir.Attr) -> Sequence[ir.Graph]:
    """The graphs that an attribute of a node holds."""
    kind = attribute.type
    if (kind is not _GRAPH and kind is not _GRAPHS) or attribute.is_ref():
        return ()
    return (attribute.as_graph(),) if kind is _GRAPH else attribute.as_graphs()


def enclosing_nodes(nodes: Iterable[ir.Node]) -> dict[ir.Graph, ir.Node]:
    """Each nested graph to its enclosing node."""
    return {graph: node for node in nodes for graph in nested_graphs(node)}


_GRAPH, _GRAPHS = ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS


def initializers(model: ir.Model) -> Iterator[ir.Value]:
    """The initializers of the graph and of nested graphs."""
    for graph in all_graphs(model):
        yield from graph.initializers.values()


def stored_tensors(model: ir.Model) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    """The values that a model stores, with their tensors: initializers, and the results of Constant nodes.

    Some exporters write all weights as Constant nodes.
    """
    constants = (node.outputs[0] for node in all_nodes(model) if node.op_type == "Constant" and node.outputs)
    for value in (*initializers(model), *constants):
        if (tensor := ir.convenience.get_const_tensor(value)) is not None:
            yield value, tensor


def held_initializers(model: ir.Model) -> Iterator[ir.Value]:
    """The initializers of the graph, of nested graphs, and of the graphs nested in functions."""
    yield from initializers(model)
    for node in chain(*map(nodes_of, model.functions.values())):
        for graph in nested_graphs(node):
            yield from graph.initializers.values()


def inputs_and_results(model: ir.Model) -> Iterator[ir.Value]:
    """The inputs of the graph and of nested graphs, and the outputs of every node."""
    for graph in model.graphs():
        yield from graph.inputs
    for node in all_nodes(model):
        yield from node.outputs


def required_inputs(model: ir.Model) -> list[ir.Value]:
    """The inputs that have to be given: an input that is an initializer as well has a default."""
    return [value for value in model.graph.inputs if not value.is_initializer()]


def default_shape(value: ir.Value) -> list[int]:
    """The shape of an initializer's tensor: one that is an input as well may have dynamic axes."""
    shape = value.const_value.shape if value.const_value is not None else value.shape
    return list(shape.numpy()) if shape is not None else []


def sizes_of(value: ir.Value) -> list[int | str | None]:
    """The sizes of a value's axes, those of dynamic axes as the names of their symbols; none if it has no shape."""
    return [size if isinstance(size, int) else size.value for size in value.shape or ()]


def may_be(first: ir.Shape | None, second: ir.Shape | None) -> bool:
    """Whether two values may have the same shape: a dynamic or unknown size may be any number."""
    if first is None or second is None:
        return True
    return len(first) == len(second) and all(
        a == b or not isinstance(a, int) or not isinstance(b, int) for a, b in zip(first, second, strict=True)
    )


def undefined_values(model: ir.Model) -> list[str]:
    """The names of the values that nodes or outputs use and nothing computes; a runtime refuses such a model."""
    used = (value for node in all_nodes(model) for value in node.inputs if value is not None)
    undefined = (
        value
        for value in (*used, *model.graph.outputs)
        if value.producer() is None and not (value.is_graph_input() or value.is_initializer())
    )
    return list(dict.fromkeys(value.name or "" for value in undefined))


def values_taken(node: ir.Node) -> Iterator[ir.Value]:
    """The values that a node takes from outside, including those that its nested graphs use."""
    yield from (value for value in node.inputs if value is not None)
    for graph in nested_graphs(node):
        for inner in graph:
            yield from (value for value in values_taken(inner) if value.graph is not graph)
        yield from (value for value in graph.outputs if value.graph is not graph)


def nodes_behind(values: Iterable[ir.Value]) -> Iterator[ir.Node]:
    """The nodes that values depend on, each once, in no particular order; nested graphs are part of their nodes."""
    pending = [producer for value in values if (producer := value.producer()) is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        for value in values_taken(node):
            if (producer := value.producer()) is not None and producer not in seen:
                seen.add(producer)
                pending.append(producer)


def consumers(node: ir.Node, enclosing: Mapping[ir.Graph, ir.Node]) -> Iterator[ir.Node]:
    """The nodes that use a node's outputs; a nested graph's outputs are used by its enclosing node."""
    for value in node.outputs:
        yield from value.consumers()
        if value.is_graph_output() and isinstance(value.graph, ir.Graph) and value.graph in enclosing:
            yield enclosing[value.graph]


def is_random(schema: onnx.defs.OpSchema) -> bool:
    """Whether an operator may return different results for the same inputs."""
    facts: Any = schema  # onnx has more of them than its type stubs
    random = facts.node_determinism == onnx.defs.OpSchema.NodeDeterminism.NonDeterministic
    return bool(random) and not facts.has_function  # onnx calls a function with an If random: AffineGrid


def draws(node: ir.Node) -> bool:
    """Whether a node itself draws random numbers."""
    if node.domain or not onnx.defs.has(node.op_type) or nested_graphs(node):  # onnx calls these random as well
        return False
    trains = node.inputs[2] if node.op_type == "Dropout" and len(node.inputs) > 2 else None
    if node.op_type == "Dropout" and (trains is None or _is_false(trains)):
        return False
    return is_random(onnx.defs.get_schema(node.op_type))


def _is_false(value: ir.Value) -> bool:
    tensor = ir.convenience.get_const_tensor(value)
    return tensor is not None and not tensor.numpy().any()

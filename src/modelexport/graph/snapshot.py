"""A tagged graph as it was, remembered before passes change it in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from modelexport.core.owners import Owner
from modelexport.graph.nodes import initializers, nested_graphs
from modelexport.graph.owners import owner_of

_INDEX = "modelexport.source"


@dataclass(frozen=True, slots=True)
class SourceNode:
    """A node of the tagged graph: what lineage has to know of it after the graph was changed in place."""

    op: ir.OperatorIdentifier
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    owner: Owner | None
    attributes: Mapping[str, ir.Attr]
    name: str = ""


@dataclass(frozen=True)
class Source:
    """A tagged graph as it was."""

    nodes: tuple[SourceNode, ...]
    producer: dict[str, int]
    """The name of a value to the index of the node that makes it."""
    initializers: Mapping[str, ir.TensorProtocol | None]
    constant: frozenset[str]
    """Values that depend on initializers and constants alone."""
    types: dict[str, tuple[ir.DataType | None, ir.Shape | None]]
    inputs: tuple[str, ...] = ()
    """Of the graph."""


def snapshot(model: ir.Model) -> Source:
    """Remember a tagged graph, and mark its nodes so that they are known again after passes changed it in place."""
    nodes: list[SourceNode] = []
    producer: dict[str, int] = {}
    tensors = {value.name or "": value.const_value for value in initializers(model)}
    constant = set(tensors)
    types: dict[str, tuple[ir.DataType | None, ir.Shape | None]] = {}
    for index, (scope, node) in enumerate(scoped_nodes(model)):
        record = SourceNode(
            node.op_identifier(),
            tuple(None if value is None else f"{scope}{value.name}" for value in node.inputs),
            tuple(f"{scope}{value.name}" for value in node.outputs if value.name),
            owner_of(node),
            dict(node.attributes),
            node.name or "",
        )
        nodes.append(record)
        node.meta[_INDEX] = index
        producer.update(dict.fromkeys(record.outputs, index))
        types.update((f"{scope}{value.name}", (value.dtype, value.shape)) for value in node.outputs if value.name)
        if not any(nested_graphs(node)) and all(name is None or name in constant for name in record.inputs):
            constant.update(record.outputs)
    inputs = tuple(value.name or "" for value in model.graph.inputs)
    return Source(tuple(nodes), producer, tensors, frozenset(constant), types, inputs)


def scoped_nodes(model: ir.Model) -> Iterator[tuple[str, ir.Node]]:
    """Every node, with a prefix that makes the names in the body of its function unique in the file."""
    for node in model.graph.all_nodes():
        yield "", node
    for function in model.functions.values():
        for node in function.all_nodes():
            yield "::".join((*function.identifier(), "")), node

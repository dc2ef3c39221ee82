"""A snapshot of a tagged graph, taken before passes change it or to compare with a file that another tool wrote."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import onnx_ir as ir

from modelexport.core.owners import Owner
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import initializers, nested_graphs, nodes_of

_MARK = "modelexport.source_node"


class SourceNode(msgspec.Struct, frozen=True):
    """A node of the source graph, with names instead of values."""

    op: ir.OperatorIdentifier
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    owner: Owner | None
    attributes: Mapping[str, ir.Attr]
    name: str = ""


@dataclass(frozen=True)
class SourceGraph:
    """The snapshot of a tagged graph: values are identified by their names, nodes by their index."""

    nodes: tuple[SourceNode, ...]
    producer: dict[str, int]
    """The name of a value to the index of the node that produces it."""
    initializers: Mapping[str, ir.TensorProtocol | None]
    constant: frozenset[str]
    """Values that depend only on initializers and constants."""
    types: dict[str, tuple[ir.DataType | None, ir.Shape | None]]
    inputs: tuple[str, ...] = ()
    """The names of the graph's inputs."""

    @cached_property
    def users(self) -> Mapping[str, Sequence[int]]:
        """The name of a value to the indices of the nodes that use it, once for each use."""
        by_name: dict[str, list[int]] = defaultdict(list)
        for index, node in enumerate(self.nodes):
            for name in node.inputs:
                if name is not None:
                    by_name[name].append(index)
        return dict(by_name)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all values: outputs of nodes, initializers and the graph's inputs."""
        return frozenset((*self.producer, *self.initializers, *self.inputs))

    def shape_of(self, name: str) -> ir.Shape | None:
        """The shape of a value that a node produces, if it is known."""
        known = self.types.get(name)
        return known[1] if known is not None else None


def take_snapshot(model: ir.Model) -> SourceGraph:
    """Take a snapshot of a tagged graph, and mark its nodes so that :func:`take_mark` finds those that passes keep."""
    nodes: list[SourceNode] = []
    producer: dict[str, int] = {}
    tensors = {value.name or "": value.const_value for value in initializers(model)}
    constant = set(tensors)
    types: dict[str, tuple[ir.DataType | None, ir.Shape | None]] = {}
    for index, node in enumerate(nodes_of(model.graph)):
        taken = [None if value is None else value.name or "" for value in node.inputs]
        outputs = [(value.name, value) for value in node.outputs if value.name]
        attributes = dict(node.attributes.data)
        produced = tuple([name for name, _ in outputs])
        nodes.append(
            SourceNode(node.op_identifier(), tuple(taken), produced, owner_of(node), attributes, node.name or "")
        )
        node.meta[_MARK] = index
        for name, value in outputs:
            producer[name] = index
            types[name] = value.dtype, value.shape
        if not nested_graphs(node) and constant.issuperset(used for used in taken if used is not None):
            constant.update(produced)
    inputs = tuple(value.name or "" for value in model.graph.inputs)
    return SourceGraph(tuple(nodes), producer, tensors, frozenset(constant), types, inputs)


def take_mark(node: ir.Node) -> int | None:
    """The index in the snapshot of a node, if it was there already; removes the mark."""
    index = node.meta.pop(_MARK, None)
    assert index is None or isinstance(index, int)
    return index

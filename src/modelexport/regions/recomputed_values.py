"""Values that a cut recomputes: constants, and sizes that can be read from its inputs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from modelexport.graph.nodes import is_random, nested_graphs, sizes_of, values_taken
from modelexport.graph.properties import copy_facts

_PARTS_OF_SHAPES = 15
"""The version of ONNX's operators since which ``Shape`` gives some of the sizes of a value."""


class Recomputable:
    """Finds the nodes of one model that can be recomputed elsewhere; results are cached."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._constant: dict[ir.Node, bool] = {}
        self._repeatable: dict[ir.OperatorIdentifier, bool] = {}

    def is_constant(self, value: ir.Value) -> bool:
        """Whether a value depends only on initializers and constants."""
        producer = value.producer()
        pending = [producer] if producer is not None and producer not in self._constant else []
        while pending:
            node = pending[-1]
            makers = {taken.producer() for taken in values_taken(node) if not taken.is_initializer()}
            if unknown := [maker for maker in makers if maker is not None and maker not in self._constant]:
                pending.extend(unknown)
                continue
            constant = all(maker is not None and self._constant[maker] for maker in makers)
            self._constant[pending.pop()] = constant and self.is_repeatable(node)
        return value.is_initializer() or (producer is not None and self._constant[producer])

    def size(
        self, value: ir.Value, cut: Container[ir.Node], arguments: Mapping[ir.Value, None]
    ) -> tuple[set[ir.Node], dict[ir.Value, SizeFromInput]] | None:
        """How to compute a size from the sizes of the cut's own values: the nodes that this takes, and sizes to renew.

        ``None`` if it depends on more than sizes and constants, or on a size that none of the inputs has.
        """
        nodes: set[ir.Node] = set()
        sizes_from_inputs: dict[ir.Value, SizeFromInput] = {}
        pending = [value]
        while pending:
            current = pending.pop()
            producer = current.producer()
            if current.is_initializer() or producer in nodes:
                continue
            if producer is None or producer in cut or not self.is_repeatable(producer):
                return None
            if producer.op_identifier() == ("", "Shape", ""):
                (measured,) = producer.inputs
                assert measured is not None
                if measured in arguments or measured.producer() in cut:
                    nodes.add(producer)
                elif (
                    self._model.opset_imports.get("", 1) >= _PARTS_OF_SHAPES
                    and (renewal := size_from_input(producer, measured, arguments)) is not None
                ):
                    sizes_from_inputs[current] = renewal
                else:
                    return None
                continue
            nodes.add(producer)
            pending.extend(values_taken(producer))
        return nodes, sizes_from_inputs

    def is_repeatable(self, node: ir.Node) -> bool:
        """Whether a node always computes the same: its operator, and those nested in it, are known and not random."""
        operator = node.op_identifier()
        if operator not in self._repeatable:
            function = self._model.functions.get(operator)
            if function is not None:
                self._repeatable[operator] = all(self.is_repeatable(inner) for inner in function)
            else:
                version = self._model.opset_imports.get(node.domain) or 1
                try:
                    schema = onnx.defs.get_schema(node.op_type, version, node.domain)
                    self._repeatable[operator] = not is_random(schema)
                except onnx.defs.SchemaError:  # an operator unknown to onnx may be random
                    self._repeatable[operator] = False
        return self._repeatable[operator] and all(
            self.is_repeatable(inner) for graph in nested_graphs(node) for inner in graph
        )


def is_size(value: ir.Value) -> bool:
    """Whether a value may be a size or a list of sizes: integers, at most one axis, of fixed length."""
    if value.dtype not in (ir.DataType.INT64, ir.DataType.INT32) or value.shape is None:
        return False
    return len(value.shape) <= 1 and value.shape.is_static()


@dataclass(frozen=True, slots=True)
class SizeFromInput:
    """A ``Shape`` of a value outside the cut, and an input of the cut with the same sizes."""

    node: ir.Node
    source: ir.Value
    start: int


def size_from_input(node: ir.Node, measured: ir.Value, arguments: Iterable[ir.Value]) -> SizeFromInput | None:
    """An input with the sizes that a ``Shape`` node measures: sizes of the same name are equal in the whole graph."""
    wanted = sizes_of(measured)[slice(node.attributes.get_int("start"), node.attributes.get_int("end"))]
    if measured.shape is None or None in wanted:
        return None
    for source in arguments:
        sizes = sizes_of(source)
        for start in range(len(sizes) - len(wanted) + 1):
            if sizes[start : start + len(wanted)] == wanted:
                return SizeFromInput(node, source, start)
    return None


def insert_shape_node(graph: ir.Graph, renewal: SizeFromInput, size: ir.Value, source: ir.Value) -> None:
    """Compute ``size``, which is no longer an input, from another input."""
    assert size.shape is not None
    (length,) = size.shape.numpy()
    node = ir.Node(
        "",
        "Shape",
        [source],
        [ir.AttrInt64("start", renewal.start), ir.AttrInt64("end", renewal.start + length)],
        outputs=[size],
        name=renewal.node.name,
    )
    copy_facts(renewal.node, node)
    graph.insert_before(graph[0], node)

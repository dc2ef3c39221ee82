"""The memory in use at each node of a run: the live values, in buffers as ONNX Runtime plans them for the CPU.

A value is alive from the node that produces it to the last node that uses it, an output of the graph to the end. Inputs
of the graph and weights are not counted. A node that only reshapes its input takes no memory, an elementwise node may
overwrite an input that is no longer needed, and any node takes a free buffer of the same shape. As in ONNX Runtime's
planner, a buffer is held from its first value to its last, also in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from modelexport.format.dtypes import bit_width
from modelexport.graph.nodes import nested_graphs, values_taken
from modelexport.graph.operator_kinds import KEEPS_ORDER
from modelexport.runtime.shapes import Shapes
from modelexport.tables.operator_costs import ELEMENTWISE, words

_SHARES_MEMORY = KEEPS_ORDER | {"Dropout"}
"""Operators whose result is in the memory of their input; a ``Dropout`` is removed."""
_NOT_IN_PLACE = frozenset(
    words("""
    And BitwiseAnd BitwiseNot BitwiseOr BitwiseXor CumSum DequantizeLinear DynamicQuantizeLinear Equal FastGelu Gelu
    Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod Or PRelu Pow QuantizeLinear RotaryEmbedding Xor
    """)
)
_IN_PLACE = (ELEMENTWISE - _NOT_IN_PLACE) | {"Softmax", "LogSoftmax"}
"""Operators whose kernels may overwrite their first or second input."""


def live_bytes(model: ir.Model, shapes: Shapes, constant: frozenset[str]) -> Mapping[ir.Node, int]:
    """Bytes of the buffers that are in use while each node runs, with those of its inputs and outputs.

    Args:
        shapes: The shapes, with a number for every size that matters; values of unknown size are not counted.
        constant: Names of values that depend only on weights, which the runtime computes once, in advance.
    """
    live: dict[ir.Node, int] = {}
    _Plan(shapes, constant, live).run(model.graph, 0)
    return live


@dataclass(eq=False)
class _Buffer:
    """Memory that several values use one after the other."""

    size: int
    kind: tuple[tuple[int, ...], int]
    """Shape and bytes of an element, which a value that reuses it must have."""
    first: int
    last: int


class _Plan:
    def __init__(self, shapes: Shapes, constant: frozenset[str], live: dict[ir.Node, int]) -> None:
        self._shapes, self._constant, self._found = shapes, constant, live

    def run(self, graph: ir.Graph, base: int) -> None:
        """Plan the buffers of a graph, with ``base`` bytes held outside of it, and of the graphs inside it."""
        nodes = list(graph)
        views: dict[ir.Value, ir.Value] = {}
        last: dict[ir.Value, int] = {}
        for index, node in enumerate(nodes):
            if node.op_type in _SHARES_MEMORY and node.inputs and node.inputs[0] is not None and node.outputs:
                views[node.outputs[0]] = views.get(node.inputs[0], node.inputs[0])
            last.update({views.get(value, value): index for value in values_taken(node)})
        last.update({views.get(value, value): len(nodes) for value in graph.outputs})
        buffers: dict[ir.Value, _Buffer] = {}
        every: list[_Buffer] = []
        free: list[_Buffer] = []
        for index, node in enumerate(nodes):
            for value in node.outputs:
                if value in views or not value.name or value.name in self._constant:
                    continue
                buffer = self._buffer(node, value, index, last, views, buffers, free)
                if buffer.first == index:
                    every.append(buffer)
                buffers[value] = buffer
                buffer.last = max(buffer.last, last.get(value, index))
            ended = {views.get(value, value): None for value in [*values_taken(node), *node.outputs]}
            for value in ended:
                if value in buffers and last.get(value, index) == index and buffers[value].last == index:
                    free.insert(0, buffers[value])
        starts, ends = [0] * (len(nodes) + 2), [0] * (len(nodes) + 2)
        for buffer in every:
            starts[buffer.first] += buffer.size
            ends[buffer.last] += buffer.size
        held = base
        for index, node in enumerate(nodes):
            held += starts[index]
            self._found[node] = held
            for nested in nested_graphs(node):
                self.run(nested, held)
            held -= ends[index]

    def _buffer(
        self,
        node: ir.Node,
        value: ir.Value,
        index: int,
        last: Mapping[ir.Value, int],
        views: Mapping[ir.Value, ir.Value],
        buffers: Mapping[ir.Value, _Buffer],
        free: list[_Buffer],
    ) -> _Buffer:
        """The buffer of an output: that of an input that is no longer needed, a free one, or a new one."""
        size = self._shapes.bytes(value)
        dtype = self._shapes.types.get(value.name or "")
        kind = (self._shapes.of(value) or (), bit_width(dtype))
        for taken in node.inputs[:2] if node.op_type in _IN_PLACE else ():
            if taken is not None:
                root = views.get(taken, taken)
                buffer = buffers.get(root)
                if buffer is not None and last.get(root) == index and buffer.last == index and buffer.kind == kind:
                    return buffer
        for position, buffer in enumerate(free):
            if buffer.kind == kind:
                return free.pop(position)
        return _Buffer(size if isinstance(size, int) else 0, kind, index, index)

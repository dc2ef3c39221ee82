"""How much memory a run needs at each node: which values are alive, as ONNX Runtime allocates them on the CPU.

A value lives from the node that makes it to the last node that uses it, an output of the graph to the end. Inputs of the
graph and weights are not counted. A node that only gives its input another shape takes no memory, and one that computes
element by element writes over an input that nothing needs any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx_ir as ir

from modelexport.graph.nodes import nested_graphs
from modelexport.measure.operators import ELEMENTWISE
from modelexport.measure.shapes import Shapes

_VIEWS = frozenset(("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout"))
_IN_PLACE = (ELEMENTWISE | {"Softmax", "LogSoftmax"}) - {"PRelu", "CumSum", "Where"}


def live_bytes(model: ir.Model, shapes: Shapes, constant: frozenset[str]) -> Mapping[ir.Node, int]:
    """Bytes of the values that are alive while each node runs, its inputs and outputs included.

    Args:
        shapes: With a number for every size that matters; values of unknown size count as none.
        constant: Names of values that depend on weights alone, which the runtime computes once, beforehand.
    """
    found: dict[ir.Node, int] = {}
    _Liveness(shapes, constant, found).run(model.graph, 0)
    return found


class _Liveness:
    def __init__(self, shapes: Shapes, constant: frozenset[str], found: dict[ir.Node, int]) -> None:
        self._shapes, self._constant, self._found = shapes, constant, found

    def run(self, graph: ir.Graph, base: int) -> None:
        """Walk over a graph, with ``base`` bytes alive outside of it."""
        nodes = list(graph)
        buffers: dict[ir.Value, ir.Value] = {}
        last: dict[ir.Value, int] = {}
        for index, node in enumerate(nodes):
            if node.op_type in _VIEWS and node.inputs and node.inputs[0] is not None and node.outputs:
                buffers[node.outputs[0]] = buffers.get(node.inputs[0], node.inputs[0])
            for value in _used(node):
                last[buffers.get(value, value)] = index
        last.update({buffers.get(value, value): len(nodes) for value in graph.outputs})
        ends: dict[int, list[ir.Value]] = {}
        for value, index in last.items():
            ends.setdefault(index, []).append(value)
        alive: dict[ir.Value, int] = {}
        total = base
        for index, node in enumerate(nodes):
            for value in node.outputs:
                if value in buffers or not value.name or value.name in self._constant:
                    continue
                size = self._size(value)
                taken = self._overwritten(node, size, index, last, alive, buffers)
                if taken is not None:
                    alive[value] = alive.pop(taken)
                else:
                    alive[value] = size
                    total += size
            self._found[node] = total
            for nested in nested_graphs(node):
                self.run(nested, total)
            dead = [*ends.get(index, ()), *(value for value in node.outputs if value not in last)]
            for value in dead:
                total -= alive.pop(value, 0)

    def _size(self, value: ir.Value) -> int:
        size = self._shapes.bytes(value)
        return size if isinstance(size, int) else 0

    def _overwritten(
        self,
        node: ir.Node,
        size: int,
        index: int,
        last: Mapping[ir.Value, int],
        alive: Mapping[ir.Value, int],
        buffers: Mapping[ir.Value, ir.Value],
    ) -> ir.Value | None:
        """The buffer of an input that ends here and that the output fits into."""
        if node.op_type not in _IN_PLACE:
            return None
        for value in node.inputs[:2]:
            if value is not None:
                buffer = buffers.get(value, value)
                if last.get(buffer) == index and alive.get(buffer) == size:
                    return buffer
        return None


def _used(node: ir.Node) -> Iterator[ir.Value]:
    """The values that a node and the graphs that it holds use."""
    yield from (value for value in node.inputs if value is not None)
    for graph in nested_graphs(node):
        for inner in graph:
            yield from _used(inner)
        yield from graph.outputs

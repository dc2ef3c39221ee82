"""Values that a file computes again from themselves, as the one that PyTorch passes on where it interpolates by zero.

``torch.lerp(a, b, 0)`` gives ``a``; a file also computes ``b - (b - a) * 1``, which is ``a`` but none of its inputs.
Where PyTorch does so, too, as in ``x + (a - x).detach()``, the order tells which of the nodes is of which call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from itertools import pairwise

import onnx_ir as ir

from modelexport.runtime.fingerprints import Fingerprint, Index
from modelexport.surgery.repeating import values_taken


class Again:
    """Tells which values of a graph are those of values that they depend on."""

    def __init__(self, graph: ir.Graph, prints: Mapping[str, Fingerprint], apart: float) -> None:
        """
        Args:
            apart: How far, in norms, values may be from each other and still be the same.
        """
        self._graph, self._prints, self._apart = graph, prints, apart
        self.nodes: set[ir.Node] = set()
        """The nodes for which that was found."""

    def computes(self, value: ir.Value) -> bool:
        """Whether a value is that of one that it depends on; its node is kept among :attr:`nodes` then."""
        node = value.producer()
        if node is None or not self.follows(value):
            return False
        self.nodes.add(node)
        return True

    def follows(self, value: ir.Value) -> bool:
        """Whether a value is that of one that it depends on."""
        node = value.producer()
        if node is None or node not in self._positions or (value.name or "") not in self._prints:
            return False
        before = {one for one in self._near(value) if self._position(one) < self._positions[node]}
        return self._leads_to(before, node)

    def in_turn(self, value: ir.Value, nodes: Collection[ir.Node]) -> list[ir.Node]:
        """Those of some nodes that compute a value, each from that of the one before; empty if not all do so."""
        makers = {node: one for one in self._near(value) if (node := one.producer()) is not None and node in nodes}
        chain = sorted(makers, key=self._positions.__getitem__)
        return chain if all(self._leads_to([makers[one]], other) for one, other in pairwise(chain)) else []

    def _near(self, value: ir.Value) -> list[ir.Value]:
        """The values that may be the same."""
        own = self._prints[value.name or ""]
        return list(self._index.near(own, self._apart))

    def _leads_to(self, values: Collection[ir.Value], node: ir.Node) -> bool:
        """Whether a node depends on one of some values."""
        first = min(map(self._position, values), default=len(self._positions))
        pending, seen = [node], {node}
        while pending:
            for taken in values_taken(pending.pop()):
                if taken in values:
                    return True
                producer = taken.producer()
                if producer is not None and producer not in seen and self._positions.get(producer, -1) > first:
                    seen.add(producer)
                    pending.append(producer)
        return False

    @cached_property
    def _positions(self) -> Mapping[ir.Node, int]:
        return {node: position for position, node in enumerate(self._graph)}

    @cached_property
    def _index(self) -> Index[ir.Value]:
        index: Index[ir.Value] = Index()
        for node in self._graph:
            for value in node.outputs:
                if (own := self._prints.get(value.name or "")) is not None:
                    index.add(own, value)
        return index

    def _position(self, value: ir.Value) -> int:
        node = value.producer()
        return self._positions[node] if node is not None else -1

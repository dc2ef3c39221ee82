"""The nodes of a model in the order in which they run, and the points between them where module calls begin or end."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from itertools import accumulate
from math import prod

import onnx_ir as ir

from modelexport.core.calls import ROOT, ModuleCall, common_stack
from modelexport.core.limits import CALL_DEPTH
from modelexport.errors import UsageError
from modelexport.format.dtypes import bit_width
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import nodes_behind, values_taken, with_nested
from modelexport.regions.graph_cutter import Cutter
from modelexport.regions.recomputed_values import is_size
from modelexport.tagged.file import TaggedFile

_NOMINAL = 32
"""The size assumed for a dynamic axis when sizes of values are compared."""
_UNKNOWN_BYTES = 10**6
"""The size assumed for a value without a shape: above that of usual activations at the nominal sizes."""


class Timeline:
    """The nodes of a model's main graph in order, without those that compute constants, which go where they are used.

    A point is the number of nodes before it. A call spans the nodes from the first to the last that it, or a call
    inside it, owns alone. A node with several owners belongs to the deepest call that contains all of them.
    """

    def __init__(self, tagged: TaggedFile) -> None:
        self._tagged = tagged
        self.cutter = Cutter(tagged)
        recomputable = self.cutter.recomputable
        self.nodes = [node for node in tagged.model.graph if not all(map(recomputable.is_constant, node.outputs))]
        if not self.nodes:
            raise UsageError(f"{tagged.path} computes only constants: there is nothing to split")
        self._position = {node: place for place, node in enumerate(self.nodes)}
        self._common: dict[tuple[ModuleCall, ...], tuple[ModuleCall, ...]] = {}
        self.spans: dict[ModuleCall, tuple[int, int]] = {}
        """The first node of each call, and the last."""
        for place, node in enumerate(self.nodes):
            for call in self._stack(node):
                first, _ = self.spans.get(call, (place, place))
                self.spans[call] = (first, place)

    def _stack(self, node: ir.Node) -> tuple[ModuleCall, ...]:
        """The calls that a node of the main graph belongs to, the root first: those that contain all of its owners."""
        owner = owner_of(node)
        if owner is None:
            return ()
        if owner.calls not in self._common:
            self._common[owner.calls] = common_stack(map(self._tagged.calls.stack, owner.calls))
        return self._common[owner.calls]

    @cached_property
    def points(self) -> dict[int, None]:
        """The points where a call begins or ends and where only its enclosing calls are cut in two.

        Of a model that is one module, every point.
        """
        if len(self._tagged.calls) == 1:
            return dict.fromkeys(range(1, len(self.nodes)))
        opened = [0] * (len(self.nodes) + 1)
        for first, last in self.spans.values():  # how many calls each point cuts in two
            if first < last:
                opened[first + 1] += 1
                opened[last + 1] -= 1
        for place in range(1, len(opened)):
            opened[place] += opened[place - 1]
        points: set[int] = set()
        for call, (first, last) in self.spans.items():
            above = self._tagged.calls.stack(call)[:-1]
            for point in (first, last + 1):
                if 0 < point < len(self.nodes):
                    spans = (self.spans.get(other, (point, point)) for other in above)
                    if sum(begin < point <= end for begin, end in spans) == opened[point]:
                        points.add(point)
        return dict.fromkeys(sorted(points))

    @cached_property
    def _values(self) -> dict[ir.Value, tuple[int, int]]:
        """The values that a node computes and a later one uses, to the points between which they are needed."""
        lives: dict[ir.Value, tuple[int, int]] = {}
        recomputable = self.cutter.recomputable
        for place, node in enumerate(self.nodes):
            for value in values_taken(node):
                producer = value.producer()
                if producer in self._position and not is_size(value) and not recomputable.is_constant(value):
                    lives[value] = (self._position[producer] + 1, place)
        return lives

    @cached_property
    def crossing(self) -> list[int]:
        """The cost of a cut at each point: first the bytes that cross it, then the number of values, then its depth.

        The three are digits of one number: the costs of all cuts add up without a carry, and one comparison decides.
        Sizes, constants, and inputs of the model are not counted.
        """
        above_values, above_depth = (len(self.nodes) * most for most in (len(self._values) + 1, CALL_DEPTH + 1))
        changes = [0] * (len(self.nodes) + 2)
        for value, (begin, end) in self._values.items():
            cost = _nbytes(value) * above_values + 1
            changes[begin] += cost
            changes[end + 1] -= cost
        costs = [total * above_depth for total in accumulate(changes[: len(self.nodes)])]
        for point in self.points:
            costs[point] += len(set(self._stack(self.nodes[point])) & set(self._stack(self.nodes[point - 1])))
        return costs

    def crossing_values(self, point: int) -> list[ir.Value]:
        """The values that cross a point."""
        return [value for value, (begin, end) in self._values.items() if begin <= point <= end]

    def items(self, places: range, measure: Callable[[ir.Node], int] | None) -> dict[Hashable, int]:
        """The sizes of some nodes: their weights and the bytes of each, or the nodes and their measures."""
        sizes: dict[Hashable, int] = {}
        for place in places:
            node = self.nodes[place]
            if measure is not None:
                sizes[place] = sum(measure(each) for each in with_nested(node))
                continue
            constants = [v for v in values_taken(node) if self.cutter.recomputable.is_constant(v)]
            behind = nodes_behind(constants)
            for value in (*constants, *(v for inner in behind for v in values_taken(inner))):
                if (tensor := ir.convenience.get_const_tensor(value)) is not None:
                    sizes[value] = tensor.nbytes
        return sizes

    def cover(self, places: range) -> tuple[list[ModuleCall], list[ModuleCall]]:
        """The outermost calls that are complete within some places, and the innermost of those that are not."""
        inside: list[ModuleCall] = []
        cut: list[ModuleCall] = []
        whole: set[ModuleCall] = set()
        for traced in self._tagged.calls:
            call = traced.call
            if call not in self.spans:
                continue
            first, last = self.spans[call]
            if places.start <= first and last < places.stop:
                whole.add(call)
                if traced.parent not in whole:
                    inside.append(call)
            elif first < places.stop and last >= places.start:
                cut.append(call)
        callers = {self._tagged.calls[call].parent for call in cut}
        return inside, [call for call in cut if call not in callers]

    def around(self, places: range) -> ModuleCall:
        """The deepest call that contains all nodes at some places."""
        common = common_stack(stack for place in places if (stack := self._stack(self.nodes[place])))
        return common[-1] if common else ROOT

    def name(self, point: int) -> str:
        """The outermost call that begins at a point, as text."""
        for traced in self._tagged.calls:
            if point and self.spans.get(traced.call, (None, None))[0] == point:
                return f"'{traced.call}'"
        stack = self._stack(self.nodes[point])
        return f"'{stack[-1]}'" if stack else f"node '{self.nodes[point].name}'"


def _nbytes(value: ir.Value) -> int:
    if value.shape is None or not (width := bit_width(value.dtype)):
        return _UNKNOWN_BYTES
    sizes = (size if isinstance(size, int) else _NOMINAL for size in value.shape)
    return max(1, prod(sizes) * width // 8)

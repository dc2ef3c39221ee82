"""Which values of a file are tensors of PyTorch's run, and which may be wrong.

A value is *known* if PyTorch computed its elements; matching is a lookup. A value is *right* if it is known, or if a
known value was computed from it: exporters take other steps than PyTorch, but a wrong step would make a later value
wrong. All other values are *suspect*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import all_nodes, enclosing_nodes, nested_graphs
from modelexport.graph.operator_kinds import CASTS, QUANTIZERS, READ_SIZES_ONLY, SELECTS_ELEMENTS
from modelexport.tagged.file import TaggedFile
from modelexport.traces.file_trace import FileTrace
from modelexport.traces.outputs_of_two_files import narrowest_type
from modelexport.traces.tolerances import EQUAL_IN_FLOAT64, EQUAL_IN_OWN_TYPES, MOST_NOISE, TIMES_NOISE, UNITS
from modelexport.traces.trace import Content, SeenTensor, Trace


@dataclass(eq=False)
class Matches:
    """A run of a file beside the one of PyTorch."""

    tagged: TaggedFile
    reference: Trace
    trace: FileTrace
    noise: Mapping[ir.Value, float] = field(default_factory=dict)
    """How far off values may be since the file has rounded constants, as a share of their size; empty if that was not
    measured, because all agrees without."""
    rounding: Mapping[ir.Value, float] = field(default_factory=dict)
    """How far values move with the last bits of inputs and constants, as a distance; empty as above."""

    def allowed_error(self, value: ir.Value) -> float:
        """How far off a value may be, as a share of its size."""
        exact = EQUAL_IN_FLOAT64 if self.reference.is_float64 else EQUAL_IN_OWN_TYPES
        noise = min(TIMES_NOISE * self.noise.get(value, 0.0), self._most_noise)
        return max(exact, self.reference.stored_tolerance if self.trace.replaced else 0.0) + noise

    @cached_property
    def _most_noise(self) -> float:
        """The most that noise excuses; a number of Python that a file has in bfloat16 is off by more than in others."""
        return max(MOST_NOISE, UNITS[narrowest_type(self.tagged.model)])

    @cached_property
    def equal_in_order(self) -> Mapping[ir.Value, list[Content]]:
        """Values to the contents with their elements in their order, those of all iterations of a loop."""
        return {
            value: [
                content
                for each in prints
                for content in self.reference.contents.equal_in_order(each, self.allowed_error(value))
            ]
            for value, prints in self.trace.prints.items()
        }

    @cached_property
    def equal_in_any_order(self) -> Mapping[ir.Value, list[Content]]:
        """Values to the contents with their elements in any order."""
        return {
            value: self.equal_in_order[value]
            or [
                content
                for each in prints
                for content in self.reference.contents.equal_in_any_order(each, self.allowed_error(value))
            ]
            for value, prints in self.trace.prints.items()
        }

    @cached_property
    def found(self) -> set[Content]:
        """The contents that are values of the file; in another order of the elements if what follows is right."""
        return {
            content
            for value in self.equal_in_order
            for content in (self.equal_in_any_order if value in self.right else self.equal_in_order)[value]
        }

    @cached_property
    def computed_calls(self) -> set[ModuleCall]:
        """The calls that compute a value of the file first; other calls only copy it."""
        return {call for content in self.found for call in tuple(content.computed)[:1]}

    @cached_property
    def nearest(self) -> Mapping[Content, tuple[ir.Value, float]]:
        """The contents that are values of the file, each to the nearest one, and how far off that is."""
        nearest: dict[Content, tuple[ir.Value, float]] = {}
        for value, contents in self.equal_in_order.items():
            for content in contents:
                its = content.fingerprint
                error = min(each.distance(its) for each in self.trace.prints[value] if each.size == its.size)
                error = error / its.norm if its.norm else error
                if content not in nearest or error < nearest[content][1]:
                    nearest[content] = value, error
        return nearest

    def relative_distance(self, value: ir.Value, tensor: SeenTensor) -> float:
        """How far off a value is from a tensor of PyTorch, as a share of its size."""
        prints = self.trace.prints.get(value)
        its = tensor.content.fingerprint
        if not prints or prints[-1].size != its.size or not its.norm:
            return float("inf")
        return prints[-1].distance(its) / its.norm

    @cached_property
    def computing(self) -> Mapping[Content, list[ir.Node]]:
        """The contents to the nodes that compute them; nodes that only move elements are left out."""
        computing: dict[Content, list[ir.Node]] = {}
        for value, contents in self.equal_in_order.items():
            node = value.producer()
            if node is not None and node.op_type not in SELECTS_ELEMENTS | CASTS | {"Constant"}:
                for content in contents:
                    computing.setdefault(content, []).append(node)
        return computing

    def is_equal(self, value: ir.Value, tensor: SeenTensor) -> bool:
        """Whether a value has the elements of a tensor, or is one that is zero but for rounding."""
        prints, its = self.trace.prints.get(value), tensor.content.fingerprint
        if not prints or self.trace.shapes.get(value) != tensor.shape:
            return False
        rounding = TIMES_NOISE * self.rounding.get(value, 0.0)
        return prints[-1].equal_in_order(its, self.allowed_error(value)) or prints[-1].distance(its) <= rounding

    @cached_property
    def order(self) -> Mapping[Content, int]:
        """The contents in the order in which PyTorch had them."""
        return {content: place for place, content in enumerate(self.reference.contents)}

    def is_telling(self, value: ir.Value) -> bool:
        """Whether a value identifies a tensor: its numbers are not those of many unrelated values, such as zeros."""
        return any(each.telling for each in self.trace.prints.get(value, ()))

    @cached_property
    def called_less_in_pytorch(self) -> set[str]:
        """The modules that PyTorch calls less often than the file: their calls have other numbers."""
        own_counts, there = (
            Counter(call.path for call in calls) for calls in (self.tagged.tags, self.reference.parents)
        )
        return {path for path, count in there.items() if count < own_counts[path]}

    def is_random(self, value: ir.Value) -> bool:
        """Whether a value depends on random numbers that are not PyTorch's."""
        return value in self.trace.random

    @cached_property
    def right(self) -> set[ir.Value]:
        """The known values, and those that they were computed from, back to values that were wrong and are replaced."""
        pending = [
            value
            for value, contents in self.equal_in_order.items()
            if contents
            and self.is_telling(value)
            and self.trace.replaced.get(value, 0.0) <= self.allowed_error(value)
            and self._in_own_call(value, contents)
        ]
        reached = set(pending)
        while pending:
            for before in self._before(pending.pop()):
                if before not in reached and self.trace.replaced.get(before, 0.0) <= self.allowed_error(before):
                    reached.add(before)
                    pending.append(before)
        return reached

    @cached_property
    def confirmed(self) -> set[ir.Value]:
        """The right values, and the values that a right one is computed from directly, wrong ones included."""
        return self.right.union(*(self._before(value) for value in self.right))

    def _before(self, value: ir.Value) -> Iterator[ir.Value]:
        """The values that a value is computed from; of what a node with graphs inside gives, what these return."""
        node, graph = value.producer(), value.graph
        if node is not None and nested_graphs(node):
            inside = {"Loop": 2, "Scan": 0}.get(node.op_type, len(node.inputs))  # the inputs that decide, and no more
            yield from (taken for taken in node.inputs[:inside] if taken is not None)
            for nested in nested_graphs(node):
                yield from nested.outputs
        elif node is not None:
            yield from (taken for taken in node.inputs if taken is not None)
        elif isinstance(graph, ir.Graph) and graph in self._enclosing:  # what a loop gives to its body
            passed = self._enclosing[graph].inputs[list(graph.inputs).index(value)] if value in graph.inputs else None
            if passed is not None:
                yield passed

    @cached_property
    def _enclosing(self) -> Mapping[ir.Graph, ir.Node]:
        return enclosing_nodes(self.tagged.nodes)

    def _in_own_call(self, value: ir.Value, contents: Sequence[Content]) -> bool:
        """Whether one of the contents is of a call that owns the value's node: elsewhere it is another tensor."""
        node = value.producer()
        owner = owner_of(node) if node is not None else None
        if node is None or owner is None:
            return True
        if value.is_graph_output() and any(self.tagged.top in content.passed for content in contents):
            return True
        return any(call in content.computed for content in contents for call in owner.calls)

    @cached_property
    def sizes(self) -> set[ir.Value]:
        """The values that are computed from sizes and constants alone."""
        sizes: set[ir.Value] = set()
        for node in all_nodes(self.tagged.model):
            taken = [value for value in node.inputs if value is not None and not value.is_initializer()]
            if node.op_type in READ_SIZES_ONLY or (
                not nested_graphs(node) and all(taken_value in sizes for taken_value in taken)
            ):
                sizes.update(node.outputs)
        return sizes

    @cached_property
    def suspect(self) -> Mapping[ir.Node, int]:
        """The nodes with values that are not right, in the order of the graph, each to its position."""
        return {
            node: position
            for position, node in enumerate(self.tagged.nodes)
            if not nested_graphs(node) and any(self._is_suspect(value) for value in node.outputs)
        }

    def _is_suspect(self, value: ir.Value) -> bool:
        if value not in self.trace.prints or value in self.right or self.is_random(value):
            return False
        if value in self.sizes and not self.is_telling(value):
            return False
        return not (self.equal_in_order[value] and not self.is_telling(value))

    def first_suspect(self, value: ir.Value) -> ir.Node | None:
        """The first suspect node, in the order of the graph, that may make a value wrong; its own if there is none.

        Values that were replaced are not followed: what is before them is not to blame. Nor is what only rounds a value
        to a few bits: it may have the owner of the value, and the error is that of the call which computes with it.
        """
        producer = value.producer()
        suspects, pending, seen = [producer] if producer is not None else [], [value], {value}
        while pending:
            for before in self._before(pending.pop()):
                if before in seen or before in self.trace.replaced:
                    continue
                seen.add(before)
                node = before.producer()
                if node is not None and node in self.suspect and node.op_type not in QUANTIZERS:
                    suspects.append(node)
                if node is None or node in self.suspect or nested_graphs(node):
                    pending.append(before)
        return min(suspects, key=lambda node: self.suspect.get(node, len(self.tagged.nodes)), default=None)


def telling_outputs(reference: Trace, call: ModuleCall) -> list[SeenTensor]:
    """The tensors that a call returned, without those that are its inputs and those that identify nothing (zeros)."""
    inputs = {tensor.content for tensor in reference.side(call, "inputs")}
    return [
        tensor
        for tensor in reference.side(call, "outputs")
        if tensor.content not in inputs and tensor.content.fingerprint.telling
    ]

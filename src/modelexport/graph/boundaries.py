"""The values that enter and leave the nodes of each call, and the arguments of ``forward`` that they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from modelexport.core.calls import CallTree, ModuleCall
from modelexport.format import documents
from modelexport.format.dtypes import dtype_name
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import nested_graphs


@dataclass
class CallBoundary:
    """The values, without initializers, that enter and leave the nodes of a call and of the calls inside it."""

    inputs: dict[ir.Value, None] = field(default_factory=dict)
    outputs: dict[ir.Value, None] = field(default_factory=dict)


def find_boundaries(model: ir.Model, calls: CallTree) -> Mapping[ModuleCall, CallBoundary]:
    """The boundary of every call, in one walk over the edges; a call without nodes has an empty one.

    A node belongs to each of its owners, so each of them counts as a producer of its outputs. A user takes an output
    from the owner that is nearest in the call tree, so arithmetic that every layer shares leaves none of them. The
    nodes of nested graphs belong to the calls of their enclosing node too.
    """
    boundaries = _Boundaries(model, calls).found
    return {traced.call: boundaries[index] for index, traced in enumerate(calls)}


class _Boundaries:
    """Identifies calls by numbers, since most of the work is looking them up."""

    def __init__(self, model: ir.Model, calls: CallTree) -> None:
        self.found = [CallBoundary() for _ in calls]
        numbers = {traced.call: index for index, traced in enumerate(calls)}
        self._stacks: list[tuple[int, ...]] = []
        """Each call with the calls that it ran in, the root last."""
        for index, traced in enumerate(calls):
            above = () if traced.parent is None else self._stacks[numbers[traced.parent]]
            self._stacks.append((index, *above))
        self._owners: dict[ir.Node, tuple[int, ...]] = {}
        self._around: dict[tuple[int, ...], frozenset[int]] = {}
        """Owners to the calls that they ran in, and themselves."""
        self._enclosing: dict[ir.Graph, ir.Node] = {}
        self._left: set[tuple[ir.Value, int | None]] = set()
        for node in model.graph.all_nodes():  # nodes of functions run where the functions are called
            owner = owner_of(node)
            owners = self._owners[node] = tuple(numbers[call] for call in owner.calls) if owner is not None else ()
            if owners not in self._around:
                self._around[owners] = frozenset(call for owned in owners for call in self._stacks[owned])
            for graph in nested_graphs(node):
                self._enclosing[graph] = node
        for node, owners in self._owners.items():
            for value in node.inputs:
                if value is None or value.is_initializer():
                    continue
                producer = value.producer()
                if producer is None or producer.graph is not node.graph or self._owners[producer] != owners:
                    self._edge(value, node)
        for graph in (model.graph, *self._enclosing):
            for value in graph.outputs:
                if not value.is_initializer():
                    self._edge(value, self._enclosing.get(graph))

    def _with_enclosing(self, node: ir.Node | None) -> Iterator[ir.Node]:
        """A node, its enclosing node, and so on outwards."""
        while node is not None:
            yield node
            node = self._enclosing.get(node.graph) if isinstance(node.graph, ir.Graph) else None

    def _edge(self, value: ir.Value, user: ir.Node | None) -> None:
        """Let a value leave and enter calls on its way from its producer to a node, or out of the graph."""
        producer = value.producer()
        # What a loop's body gets in each iteration comes from the loop.
        maker = producer or (self._enclosing.get(value.graph) if isinstance(value.graph, ir.Graph) else None)
        makers = [self._around[self._owners[node]] for node in self._with_enclosing(maker)]
        for node in self._with_enclosing(user):
            for call in self._owners[node]:
                for above in self._stacks[call]:
                    if any(above in around for around in makers):
                        break
                    self.found[above].inputs[value] = None
        if producer is None:
            return
        if user is None or not self._owners[user]:  # the user is outside of every call
            self._leave(value, producer, None)
        for call in self._owners[user] if user is not None else ():
            self._leave(value, producer, next((c for c in self._stacks[call] if c in makers[0]), None))

    def _leave(self, value: ir.Value, producer: ir.Node, meeting: int | None) -> None:
        """Let a value leave every call that its producer ran in, up to the first that its user ran in as well."""
        if (value, meeting) in self._left:
            return
        self._left.add((value, meeting))
        for owned in self._owners[producer]:
            stack = self._stacks[owned]
            if meeting is None or meeting in stack:
                for call in stack[: stack.index(meeting)] if meeting is not None else stack:
                    self.found[call].outputs[value] = None


def match_values(
    values: Sequence[ir.Value], tensors: Sequence[documents.CallTensor]
) -> dict[ir.Value, documents.CallTensor]:
    """Match values in the file to tensors of the PyTorch call, in the order of the tensors.

    The sidecar names most of them. A remaining value matches a tensor of the same name and element type and of a
    fitting shape; any other value matches if it fits one tensor only and no other value fits that tensor. Sizes fit
    when they are equal or when one of the two is dynamic: the file and the trace may name a dynamic size differently.

    Args:
        values: The values that enter, or those that leave, the nodes of a call.
        tensors: What its module got, or returned. Of several tensors with the same value the first is used.
    """
    by_name: dict[str | None, int] = {}
    for i, tensor in enumerate(tensors):
        if tensor.value is not None:
            by_name.setdefault(tensor.value, i)
    matched = {value: by_name[value.name] for value in values if value.name in by_name}
    unknown = [i for i, tensor in enumerate(tensors) if tensor.value is None]
    fitting = {value: [i for i in unknown if _fits(value, tensors[i])] for value in values if value not in matched}
    for value, indices in fitting.items():
        if (same := next((i for i in indices if tensors[i].name == value.name), None)) is not None:
            matched[value] = same
    taken = set(matched.values())
    candidates: dict[int, list[ir.Value]] = defaultdict(list)
    for value, indices in fitting.items():
        fitting[value] = [i for i in indices if i not in taken] if value not in matched else []
        for i in fitting[value]:
            candidates[i].append(value)
    matched.update((rivals[0], i) for i, rivals in candidates.items() if len(rivals) == 1 == len(fitting[rivals[0]]))
    return {value: tensors[i] for value, i in sorted(matched.items(), key=lambda match: match[1])}


def _fits(value: ir.Value, tensor: documents.CallTensor) -> bool:
    if value.dtype is None or value.shape is None or dtype_name(value.dtype) != tensor.dtype:
        return False
    return len(value.shape) == len(tensor.shape) and all(
        not isinstance(size, int) or not isinstance(wanted, int) or size == wanted
        for size, wanted in zip(value.shape, tensor.shape, strict=True)
    )

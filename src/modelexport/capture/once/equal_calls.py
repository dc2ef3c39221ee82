"""Calls whose captured graphs are equal: the layers of a stack, found by what they do and not by their code."""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.fx

from modelexport.core.calls import ModuleCall, TracedCall
from modelexport.pytorch.private_torch import schema_of

SMALLEST = 8
"""The least number of FX nodes of a call that is worth sharing.

A shared call is itself two or three FX nodes, and decomposition costs about the same for each.
"""


@dataclass(frozen=True)
class FxRegion:
    """The FX nodes of one call, in order; other calls run before all of them or after."""

    call: ModuleCall
    nodes: tuple[torch.fx.Node, ...]

    @cached_property
    def position(self) -> Mapping[torch.fx.Node, int]:
        return {node: index for index, node in enumerate(self.nodes)}

    @cached_property
    def inputs(self) -> tuple[torch.fx.Node, ...]:
        """The nodes before the region whose values it uses, in the order in which it first uses them."""
        sources = {
            source: None for node in self.nodes for source in node.all_input_nodes if source not in self.position
        }
        return tuple(sources)

    @cached_property
    def outputs(self) -> tuple[int, ...]:
        """The positions of the nodes whose values are used behind the region."""
        return tuple(
            index for index, node in enumerate(self.nodes) if any(user not in self.position for user in node.users)
        )


def find_repeats(graph: torch.fx.Graph, calls: Sequence[TracedCall], address_key: str) -> list[tuple[FxRegion, ...]]:
    """Find the calls of a captured graph that compute the same function of what they get.

    Two calls are equal if their nodes have the same targets and constants, are connected in the same way, and make and
    get tensors of the same types, shapes and strides. What comes from outside, parameters included, counts by its
    position. The outermost calls that have an equal one are taken; what is inside them is not looked at.

    Args:
        graph: From ``torch.export``, before decomposition. Its nodes have the address of their call as
            ``meta["custom"][address_key]``.
        calls: The calls of the capture.

    Returns:
        Classes of two or more equal regions, each in the order of the graph.
    """
    regions = _regions(graph, calls, address_key)
    written = _writes(graph)
    order = {node: index for index, node in enumerate(graph.nodes)}
    by_length = Counter(len(region.nodes) for region in regions.values())
    keys: dict[ModuleCall, Hashable] = {}
    for call, region in regions.items():
        if by_length[len(region.nodes)] > 1 and _is_pure(region, written, order) and (key := _key(region)) is not None:
            keys[call] = key
    return [tuple(regions[call] for call in equal) for equal in _outermost(calls, keys)]


def _regions(graph: torch.fx.Graph, calls: Sequence[TracedCall], address_key: str) -> dict[ModuleCall, FxRegion]:
    """Regions of all calls of a size worth sharing whose nodes have no node of another call between them.

    Of calls with the same nodes (a module that only calls another one) the outermost is taken. A node without an
    address, which an exporter put in another's place, belongs to a region if it is between nodes of it.
    """
    parents = {traced.call: traced.parent for traced in calls}
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    first: dict[ModuleCall, int] = {}
    last: dict[ModuleCall, int] = {}
    count: Counter[ModuleCall] = Counter()
    nameless = [0]
    for index, node in enumerate(nodes):
        address = (node.meta.get("custom") or {}).get(address_key)
        nameless.append(nameless[-1] + (address is None))
        call = None if address is None else ModuleCall.parse(address)
        while call is not None:
            first.setdefault(call, index)
            last[call] = index
            count[call] += 1
            call = parents.get(call)
    regions: dict[ModuleCall, FxRegion] = {}
    spans: set[tuple[int, int]] = set()
    for traced in calls:
        call = traced.call
        if traced.parent is None or count[call] < SMALLEST:
            continue
        start, end = first[call], last[call] + 1
        if end - start == count[call] + nameless[end] - nameless[start] and (start, end) not in spans:
            spans.add((start, end))
            regions[call] = FxRegion(call, tuple(nodes[start:end]))
    return regions


def _outermost(calls: Sequence[TracedCall], keys: Mapping[ModuleCall, Hashable]) -> list[list[ModuleCall]]:
    """Classes of equal calls, none of them inside another one; each in the order in which they began."""
    count = Counter(keys.values())
    classes: dict[Hashable, list[ModuleCall]] = defaultdict(list)
    inside: set[ModuleCall | None] = set()
    for traced in calls:  # callers before what they call
        key = keys.get(traced.call)
        if traced.parent in inside:
            inside.add(traced.call)
        elif key is not None and count[key] > 1:
            classes[key].append(traced.call)
            inside.add(traced.call)
    return [equal for equal in classes.values() if len(equal) > 1]


def _writes(graph: torch.fx.Graph) -> list[tuple[torch.fx.Node, frozenset[int]]]:
    """The nodes that write into the memory of their arguments, with that memory."""
    writers = []
    for node in graph.nodes:
        schema = schema_of(node.target)
        if schema is not None and schema.is_mutable:
            writers.append((node, frozenset(_memory(node.all_input_nodes))))
    return writers


def _is_pure(
    region: FxRegion, written: Iterable[tuple[torch.fx.Node, frozenset[int]]], order: Mapping[torch.fx.Node, int]
) -> bool:
    """Whether a region is a function of the values of its inputs.

    It is not if it writes into what it gets, or if memory that it uses is written into once it has begun.
    """
    begin = order[region.nodes[0]]
    inside, taken = frozenset(_memory(region.nodes)), frozenset(_memory(region.inputs))
    for writer, memory in written:
        if writer in region.position:
            if memory & taken:
                return False
        elif order[writer] > begin and memory & (inside | taken):
            return False
    return True


def _memory(nodes: Iterable[torch.fx.Node]) -> Iterator[int]:
    """The storages of the tensors that nodes make: tensors that are views of each other have the same."""
    for node in nodes:
        value_or_values = node.meta.get("val")
        for value in value_or_values if isinstance(value_or_values, (list, tuple)) else (value_or_values,):
            if isinstance(value, torch.Tensor):
                yield storage_of(value)


def storage_of(tensor: torch.Tensor) -> int:
    """A number for the memory of a tensor; of a fake one, too, whose data pointer says nothing.

    ``UntypedStorage._cdata`` is not a documented interface; ``torch.multiprocessing.reductions`` tells storages apart
    by it as well.
    """
    return int(tensor.untyped_storage()._cdata)


def _key(region: FxRegion) -> Hashable | None:
    """A key that two regions share only if they are equal; ``None`` for a region that cannot be shared."""
    outputs = [region.nodes[index] for index in region.outputs]
    if not all(isinstance(node.meta.get("val"), torch.Tensor) for node in outputs):
        return None
    if not all(isinstance(node.meta.get("val"), (torch.Tensor, torch.SymInt)) for node in region.inputs):
        return None
    references: dict[torch.fx.Node, Hashable] = {node: ("inside", index) for node, index in region.position.items()}
    references |= {node: ("outside", index) for index, node in enumerate(region.inputs)}
    try:
        nodes = [
            (node.op, node.target, *(_comparable(arguments, references) for arguments in (node.args, node.kwargs)))
            for node in region.nodes
        ]
        values = [_described(node.meta.get("val")) for node in (*region.nodes, *region.inputs)]
        return tuple(nodes), tuple(values), region.outputs
    except _NotComparableError:
        return None


class _NotComparableError(Exception):
    """An argument of which cannot be said whether another one is equal to it."""


def _comparable(value: Any, references: Mapping[torch.fx.Node, Hashable]) -> Hashable:
    """An argument as a value that is equal for equal arguments only.

    Args:
        references: What to take for each FX node.

    Raises:
        _NotComparableError: There is none.
    """
    if isinstance(value, torch.fx.Node):
        return references[value]
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_comparable(part, references) for part in value))
    if isinstance(value, Mapping):
        return ("dict", *((key, _comparable(part, references)) for key, part in value.items()))
    if isinstance(value, slice):
        return ("slice", *(_comparable(part, references) for part in (value.start, value.stop, value.step)))
    if value is None or isinstance(
        value, (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
    ):
        return (type(value).__name__, repr(value))  # as text: 0.0 and -0.0 are equal numbers, and nan is not
    raise _NotComparableError


def _described(value: Any) -> Hashable:
    """What is known of a value before it is computed: type, shape, strides, device.

    Raises:
        _NotComparableError: It is neither a tensor nor a number, nor several of them.
    """
    if isinstance(value, torch.Tensor):
        strides = tuple(map(str, value.stride())) if value.layout == torch.strided else ()
        facts = (value.dtype, value.device, value.layout, value.requires_grad, str(value.storage_offset()))
        return ("tensor", tuple(map(str, value.shape)), strides, *facts)
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    if value is None or isinstance(value, (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (type(value).__name__, str(value))
    raise _NotComparableError


def is_item(node: torch.fx.Node) -> bool:
    """Whether a node takes one result out of several."""
    return node.op == "call_function" and node.target is operator.getitem

"""Which nodes run in which call of a file, and which values each call takes and returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from modelexport.core.calls import ModuleCall, common_stack
from modelexport.core.limits import TESTED_ELEMENTS
from modelexport.format.documents import CallEntry, CallTensor
from modelexport.graph.nodes import nested_graphs
from modelexport.tagged.documents.export_facts import present_values
from modelexport.tagged.encodings.functions_call_groups import Group, Item, group_calls
from modelexport.tagged.file import TaggedFile
from modelexport.tools.to_torch.entries_as_nodes import NARROW, SMALL, Constants, Entries
from modelexport.tools.to_torch.expressions import type_name
from modelexport.tools.to_torch.size_numbers import FileNumbers

_RESULT = "output"


class CallLayout:
    """The calls of a file as functions of values.

    Args:
        constants: The constants of the graph.
        numbers: What it computes from sizes.
    """

    def __init__(self, tagged: TaggedFile, entries: Entries, constants: Constants, numbers: FileNumbers) -> None:
        self.tagged, self.entries, self.constants, self.numbers = tagged, entries, constants, numbers
        self.graph = tagged.model.graph
        self.is_wide, self.array = constants.is_wide, constants.array
        self.elements_left = TESTED_ELEMENTS
        """How many elements may still be computed to find classes."""
        grouping = group_calls(tagged.model, tagged.calls)
        self.items: Mapping[ir.Graph, list[Item]] = grouping.items
        self.root = Group(tagged.calls.calls[0].call, grouping.items[self.graph])
        self.groups: dict[ModuleCall, Group] = {}
        self.chain: dict[ir.Node, tuple[ModuleCall, ...]] = {}
        """Each node with the calls that it runs in, the root first."""
        self._ends: dict[ir.Value, list[tuple[ModuleCall, ...]]] = {}
        """The results of branches, loops and the file with the calls that these run in."""
        self.around: dict[ModuleCall, tuple[ModuleCall, ...]] = {}
        """Each call with the calls that it runs in, the root first."""
        self.unchanged: dict[ModuleCall, ir.Value] = {}
        """Calls without nodes that return what they get, with that."""
        self._given: dict[ModuleCall, ir.Value] = {}
        self.got: dict[ModuleCall, CallTensor] = {}
        """Calls without nodes to the tensor that their module got first."""
        self._place(self.root, ())
        sidecar = tagged.hierarchy
        listed = {ModuleCall.parse(entry.address): entry for entry in sidecar.calls} if sidecar is not None else {}
        self.arguments = {
            call: {tensor.value: tensor.name for tensor in reversed(entry.inputs) if tensor.value}
            for call, entry in listed.items()
        }
        """The names of the arguments of each call by value."""
        self._add_calls_without_nodes(listed)
        self.homes = {value: self._home(value) for value in constants if constants[value].nbytes > SMALL}
        """The path of the module that has a large constant."""
        self.inputs: dict[ModuleCall, list[ir.Value]] = {}
        self.outputs: dict[ModuleCall, list[ir.Value]] = {}
        self._find_boundaries(self.root)
        self.inputs[self.root.call], self.outputs[self.root.call] = list(self.graph.inputs), list(self.graph.outputs)
        self.sizes = {call: self._sizes_of(inputs) for call, inputs in self.inputs.items()}
        """The names of sizes to the first input of each call that has one, and its axis."""
        for call in self.groups.keys() - {self.root.call}:
            self.inputs[call] = [value for value in self.inputs[call] if not self.has_sizes_of(value, call)]
            self.outputs[call] = [value for value in self.outputs[call] if not self._is_size_for_users(value)]
        self.boundary = {*self.graph.inputs, *self.graph.outputs}
        names = [value.name for value in self.graph.outputs]
        self.results = "tensor" if names == [_RESULT] else "dict"
        """What the root returns; the format calls a result without fields ``output``, and its elements ``output.0``."""
        if len(names) > 1 and names == [f"{_RESULT}.{number}" for number in range(len(names))]:
            self.results = "tuple"

    def type_name(self, dtype: ir.DataType) -> str:
        """PyTorch's name of an element type, as the code computes in it."""
        name = type_name(dtype)
        return "float64" if self.is_wide and name in NARROW else name

    def _place(self, group: Group, around: tuple[ModuleCall, ...]) -> None:
        self.groups[group.call] = group
        chain = self.around[group.call] = (*around, group.call)
        if not around:
            self._add_ends(self.graph, chain)
        self._place_items(group.items, chain)

    def _add_ends(self, graph: ir.Graph, chain: tuple[ModuleCall, ...]) -> None:
        for value in graph.outputs:
            self._ends.setdefault(value, []).append(chain)

    def _place_items(self, items: Sequence[Item], chain: tuple[ModuleCall, ...]) -> None:
        for item in items:
            if isinstance(item, Group):
                self._place(item, chain)
                continue
            self.chain[item] = chain
            for graph in nested_graphs(item):
                self._add_ends(graph, chain)
                self._place_items(self.items[graph], chain)

    def _home(self, value: ir.Value) -> str:
        paths = [
            self._giver(value, self.chain[use.node]).path.split(".") for use in value.uses() if use.node in self.chain
        ]
        common: list[str] = []
        for parts in zip(*paths, strict=False):
            if len(set(parts)) > 1:
                break
            common.append(parts[0])
        called = {call.path for call in self.groups}
        while ".".join(common) not in called:
            common.pop()
        return ".".join(common)

    def _giver(self, value: ir.Value, chain: tuple[ModuleCall, ...]) -> ModuleCall:
        """The innermost call of a chain that a constant is not an argument of."""
        return next((call for call in reversed(chain) if not self._is_argument(value, call)), chain[0])

    def _is_argument(self, value: ir.Value, call: ModuleCall) -> bool:
        is_given = value.name in self.arguments.get(call, ()) or (value, call) in self.entries.given
        return value in self.constants and is_given and call != self.root.call

    def is_within_reach(self, value: ir.Value, call: ModuleCall) -> bool:
        """Whether a module has an entry or constant of its own, or in a module inside it."""
        path = call.path
        if self._is_argument(value, call):
            return False
        if value in self.entries.values:
            names = self.entries.names.get(self.entries.values[value], (self.entries.values[value],))
            return any(is_below(name, path) for name in names)
        if value in self.homes:
            return self.homes[value] == path or is_below(self.homes[value], path)
        return value in self.constants

    def _find_boundaries(self, group: Group) -> tuple[dict[ir.Value, None], set[ir.Value]]:
        """What a call uses and does not compute, and what it computes; writes down its inputs and outputs."""
        call = group.call
        used: dict[ir.Value, None] = {self._given[call]: None} if call in self._given else {}
        made: dict[ir.Value, None] = {}
        self._walk(group.items, used, made)
        outside = {value: None for value in used if value not in made and not self.is_within_reach(value, call)}
        order = [*reversed(self.arguments.get(call, ()))]  # as the module was called
        self.inputs[call] = sorted(outside, key=lambda v: order.index(v.name) if v.name in order else len(order))
        self.outputs[call] = [value for value in made if self._leaves(value, call)]
        self.outputs[call] += [self.unchanged[call]] if call in self.unchanged else []
        return outside, set(made)

    def _sizes_of(self, inputs: Sequence[ir.Value]) -> dict[str, tuple[ir.Value, int]]:
        found: dict[str, tuple[ir.Value, int]] = {}
        for value in inputs:
            if value not in self.numbers.known and value.shape is not None and isinstance(value.type, ir.TensorType):
                for axis, size in enumerate(value.shape):
                    if isinstance(size, ir.SymbolicDim) and size.value:
                        found.setdefault(f"<{size.value}>", (value, axis))
        return found

    def has_sizes_of(self, value: ir.Value, call: ModuleCall) -> bool:
        """Whether a call can compute a value from sizes of its own inputs."""
        return value in self.numbers.known and self.numbers.names(value) <= self.sizes[call].keys()

    def _is_size_for_users(self, value: ir.Value) -> bool:
        users = [self.chain[use.node][-1] for use in value.uses() if use.node in self.chain]
        return not value.is_graph_output() and all(self.has_sizes_of(value, user) for user in users)

    def _walk(self, items: Sequence[Item], used: dict[ir.Value, None], made: dict[ir.Value, None]) -> None:
        for item in items:
            if isinstance(item, Group):
                outside, _ = self._find_boundaries(item)
                used.update(outside)
                made.update(dict.fromkeys(self.outputs[item.call] if item.call not in self.unchanged else ()))
                continue
            used.update(dict.fromkeys(value for value in item.inputs if value is not None))
            for graph in nested_graphs(item):
                made.update(dict.fromkeys(graph.inputs))
                self._walk(self.items[graph], used, made)
                used.update(dict.fromkeys(graph.outputs))
            if item.op_type != "Constant" or item.domain:
                made.update(dict.fromkeys(value for value in item.outputs if value.name))

    def _leaves(self, value: ir.Value, call: ModuleCall) -> bool:
        """Whether a value is used, or is the result of a branch, loop or file that runs, outside of a call."""
        used = (self.chain[use.node] for use in value.uses() if use.node in self.chain)
        return any(call not in chain for chain in (*used, *self._ends.get(value, ())))

    def _add_calls_without_nodes(self, listed: Mapping[ModuleCall, CallEntry]) -> None:
        """Add the calls without nodes to the groups of their callers, after the call before them. Each gets what its
        module got first, if that can reach it, and returns it if its module did.
        """
        values = {value.name: value for value in present_values(self.tagged.model)}
        before: dict[ModuleCall, Group] = {}
        for call, entry in listed.items():
            caller = self.tagged.calls[call].parent
            if caller is None or caller not in self.groups or entry.enter is None:
                continue
            if call not in self.groups:
                group, items = Group(call, []), self.groups[caller].items
                value = values.get(entry.inputs[0].value) if entry.inputs else None
                place = None if value is None else self._place_of(value, caller)
                self._place(group, self.around[caller])
                if entry.inputs:
                    self.got[call] = entry.inputs[0]
                if value is not None and place is not None:
                    self._given[call] = value
                    self._ends.setdefault(value, []).append(self.around[call])
                if value is not None and place is not None and value.name in [each.value for each in entry.outputs[:1]]:
                    self.unchanged[call] = value
                    while place < len(items) and self._passes(items[place], value):
                        place += 1
                else:
                    place = max(place or 0, items.index(before[caller]) + 1 if before.get(caller) in items else 0)
                items.insert(place, group)
            before[caller] = self.groups[call]

    def _passes(self, item: Item, value: ir.Value) -> bool:
        return isinstance(item, Group) and self.unchanged.get(item.call) is value

    def _place_of(self, value: ir.Value, call: ModuleCall) -> int | None:
        """The first place among the items of a call where it has a value; ``None`` if the value cannot reach it."""
        producer, stack = value.producer(), self.around[call]
        if value in self.constants or value in self.entries.values or value in self.numbers.known:
            return None
        if producer is None:
            return 0 if value in self.graph.inputs else None
        depth = len(common_stack([stack, self.chain[producer]]))
        items = self.groups[stack[depth - 1]].items
        first = producer if depth == len(self.chain[producer]) else self.groups[self.chain[producer][depth]]
        if first not in items:  # in a branch or loop
            return None
        if depth == len(stack):
            return items.index(first) + 1
        return 0 if self.groups[stack[depth]] in items[items.index(first) :] else None


def is_below(path: str, above: str) -> bool:
    """Whether a path, or the key of an entry, is inside a module."""
    return not above or path.startswith(f"{above}.")

"""Groups the nodes of a flat graph by call, if the nodes of a call can be replaced by one node.

That is possible if no value that leaves a call's nodes returns to them through other nodes, if sibling calls do not
depend on each other in a cycle, and if all nodes of a call are in one graph. A node that several calls own is placed in
the deepest call that contains all of them, or, if a value would return to one of its owners through it, in that owner.
The search goes from the outside in. Each call takes one pass over the edges between its items; only if these cannot be
ordered does a second pass find the calls that cause this.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from modelexport.core.calls import CallTree, ModuleCall, common_stack
from modelexport.graph.node_owners import owner_of, required_owner
from modelexport.graph.nodes import nested_graphs


@dataclass(eq=False)
class Group:
    """The nodes of one call, in an order in which they can run; the calls inside it are groups themselves."""

    call: ModuleCall
    items: list[Item]


Item = ir.Node | Group
Part = ModuleCall | ir.Node
"""The group of a call, or a single node."""


@dataclass
class Grouping:
    """A graph as nested groups."""

    items: dict[ir.Graph, list[Item]] = field(default_factory=dict)
    """The main graph and the nested graphs to their items."""
    flat: list[ModuleCall] = field(default_factory=list)
    """The calls with nodes that cannot be a group."""


def group_calls(model: ir.Model, calls: CallTree) -> Grouping:
    """Group the nodes of a model by call; every node must have an owner. The root is the graph itself."""
    return _Grouper(calls).run(model.graph)


@dataclass
class _Grouper:
    calls: CallTree
    found: Grouping = field(default_factory=Grouping)
    home: dict[ir.Node, tuple[ModuleCall, ...]] = field(default_factory=dict)
    """Node to the call that it is placed in, as the stack of calls down to it."""
    uses: dict[ir.Node, list[ir.Value]] = field(default_factory=dict)
    """Node to the values that it and the graphs nested in it use from outside."""
    scattered: set[ModuleCall] = field(default_factory=set)
    stacks: dict[ModuleCall, tuple[ModuleCall, ...]] = field(default_factory=dict)
    formed: set[ModuleCall] = field(default_factory=set)

    def run(self, graph: ir.Graph) -> Grouping:
        self._settle(graph)
        root = self.calls.calls[0].call
        self._find_scattered(graph, root)
        self._plan_graph(graph, root)
        owners = {call for node in graph.all_nodes() for call in required_owner(node).calls}
        with_nodes = {call for owner in owners for call in self._stack(owner)}
        self.found.flat = sorted(with_nodes - self.formed - {root})
        return self.found

    def _stack(self, call: ModuleCall) -> tuple[ModuleCall, ...]:
        if call not in self.stacks:
            self.stacks[call] = self.calls.stack(call)
        return self.stacks[call]

    def _settle(self, graph: ir.Graph) -> list[ir.Value]:
        """Find the place of each node; returns the values that the graph uses from outside."""
        outside: dict[ir.Value, None] = {}
        inside: set[ir.Value] = {*graph.inputs, *graph.initializers.values()}
        for node in graph:
            owner = required_owner(node)
            home = common_stack(map(self._stack, owner.calls))
            used = dict.fromkeys(value for value in node.inputs if value is not None)
            for nested in nested_graphs(node):
                used.update(dict.fromkeys(self._settle(nested)))
                home = common_stack([home, *(self.home[inner] for inner in nested)])
            self.home[node] = home
            self.uses[node] = list(used)
            outside.update((value, None) for value in used if value not in inside)
            inside.update(node.outputs)
        outside.update((value, None) for value in graph.outputs if value not in inside)
        return list(outside)

    def _find_scattered(self, graph: ir.Graph, root: ModuleCall) -> None:
        seen: dict[ModuleCall, ir.Graph] = {}
        pending = [(graph, root)]
        while pending:
            current, base = pending.pop()
            depth = len(self._stack(base))
            for node in current:
                for call in self.home[node][depth:]:
                    if seen.setdefault(call, current) is not current:
                        self.scattered.add(call)
                pending.extend((nested, self.home[node][-1]) for nested in nested_graphs(node))

    def _plan_graph(self, graph: ir.Graph, base: ModuleCall) -> None:
        self.found.items[graph] = self._plan(list(graph), base)

    def _plan(self, nodes: Sequence[ir.Node], base: ModuleCall) -> list[Item]:
        """The items of a call, or of a graph nested in it, in an order in which they can run."""
        scope = _Scope(nodes, self.uses, self.home, len(self._stack(base)), self._stack)
        while blamed := [call for call in scope.members if call in self.scattered] or scope.blame():
            if scope.strays:
                for node, owner in scope.strays:
                    self.home[node] = self._stack(owner)
                    scope.move(node)
                continue
            for call in blamed:
                scope.dissolve(call)
        items: list[Item] = []
        for item in scope.order:
            if isinstance(item, ModuleCall):
                self.formed.add(item)
                items.append(Group(item, self._plan(scope.members[item], item)))
            else:
                items.append(item)
                for nested in nested_graphs(item):
                    self._plan_graph(nested, self.home[item][-1])
        return items


@dataclass
class _Scope:
    """The nodes inside one call, each by itself or in the group of a call inside it."""

    nodes: Sequence[ir.Node]
    uses: Mapping[ir.Node, list[ir.Value]]
    home: Mapping[ir.Node, tuple[ModuleCall, ...]]
    depth: int
    """Length of the call's stack."""
    stack: Callable[[ModuleCall], tuple[ModuleCall, ...]]

    def __post_init__(self) -> None:
        self.position = {node: index for index, node in enumerate(self.nodes)}
        self.part: dict[ir.Node, Part] = {}
        self.members: dict[ModuleCall, list[ir.Node]] = {}
        self.strays: list[tuple[ir.Node, ModuleCall]] = []
        self.moved: set[ir.Node] = set()
        for node in self.nodes:
            self._place(node, self.depth)

    def _place(self, node: ir.Node, depth: int) -> None:
        """Put a node into the group of its call at a depth, or by itself if it is placed above that depth."""
        stack = self.home[node]
        if len(stack) > depth:
            self.part[node] = stack[depth]
            self.members.setdefault(stack[depth], []).append(node)
        else:
            self.part[node] = node

    def dissolve(self, call: ModuleCall) -> None:
        """Split a group into its own nodes and the groups inside it."""
        members = self.members.pop(call)
        depth = self.home[members[0]].index(call) + 1
        for node in members:
            self._place(node, depth)

    def move(self, node: ir.Node) -> None:
        """Put a node that was by itself into the group that it is now placed in."""
        group = next(call for call in self.home[node] if call in self.members)
        self.part[node] = group
        self.members[group].append(node)
        self.members[group].sort(key=self.position.__getitem__)
        self.moved.add(node)

    def sources(self, node: ir.Node) -> Iterator[ir.Node]:
        """The other nodes of the scope whose values a node uses."""
        for value in self.uses[node]:
            producer = value.producer()
            if producer is not None and producer in self.position:
                yield producer

    def blame(self) -> list[ModuleCall]:
        """The groups to dissolve, because they depend on each other. If there are none, ``order`` has the sorted parts.

        The ``strays`` have to be moved first: nodes outside their owners' groups through which values return.
        """
        self.strays = []
        after: dict[Part, set[Part]] = {}
        waits: dict[Part, int] = {}
        rank: dict[Part, int] = {}
        for index, node in enumerate(self.nodes):
            part = self.part[node]
            rank.setdefault(part, index)
            after.setdefault(part, set())
            waits.setdefault(part, 0)
            for producer in self.sources(node):
                source = self.part[producer]
                if source != part and part not in after[source]:
                    after[source].add(part)
                    waits[part] += 1
        by_rank = {index: part for part, index in rank.items()}
        ready = [rank[part] for part, count in waits.items() if not count]
        heapq.heapify(ready)
        self.order: list[Part] = []
        while ready:
            part = by_rank[heapq.heappop(ready)]
            self.order.append(part)
            for later in after[part]:
                waits[later] -= 1
                if not waits[later]:
                    heapq.heappush(ready, rank[later])
        waiting = [part for part, count in waits.items() if count]
        blamed: list[ModuleCall] = []
        for cycle in _cycles(waiting, after):
            if returning := self._returning(cycle):
                blamed.extend(returning)
            else:  # calls that depend on each other, of which one is enough
                calls = [part for part in cycle if isinstance(part, ModuleCall)]
                blamed.append(min(calls, key=lambda call: self.position[self.members[call][0]]))
        return blamed

    def _nodes(self, part: Part) -> Sequence[ir.Node]:
        return self.members[part] if isinstance(part, ModuleCall) else (part,)

    def _returning(self, cycle: Sequence[Part]) -> dict[ModuleCall, None]:
        """The groups that a path leaves and returns to."""
        bits = {part: 1 << i for i, part in enumerate(part for part in cycle if isinstance(part, ModuleCall))}
        passed: dict[ir.Node, int] = {}
        returning: dict[ModuleCall, None] = {}
        nodes = sorted((node for part in cycle for node in self._nodes(part)), key=self.position.__getitem__)
        for node in nodes:
            part = self.part[node]
            own_bit = bits[part] if isinstance(part, ModuleCall) else 0
            before = 0
            for producer in self.sources(node):
                reached = passed.get(producer, 0)
                before |= reached
                if isinstance(part, ModuleCall) and reached & own_bit and self.part[producer] != part:
                    returning[part] = None
            passed[node] = before | own_bit
            movable = part == node and node not in self.moved and not any(nested_graphs(node))
            if movable and (owner := self._owner_passed(node, before, bits)) is not None:
                self.strays.append((node, owner))
        return returning

    def _owner_passed(self, node: ir.Node, passed: int, bits: Mapping[ModuleCall, int]) -> ModuleCall | None:
        """One of a node's owners that is in a group on a path to the node."""
        owner = owner_of(node)
        assert owner is not None
        for call in owner.calls:
            if any(bits.get(around, 0) & passed for around in self.stack(call)):
                return call
        return None


def _cycles(parts: Iterable[Part], after: Mapping[Part, Iterable[Part]]) -> Iterator[list[Part]]:
    """The strongly connected components of the parts: Tarjan's algorithm, without recursion."""
    number: dict[Part, int] = {}
    low: dict[Part, int] = {}
    open_parts: dict[Part, None] = {}
    for start in parts:
        if start in number:
            continue
        work = [(start, iter(after[start]))]
        number[start] = low[start] = len(number)
        open_parts[start] = None
        while work:
            part, rest = work[-1]
            following = next(rest, None)
            if following is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[part])
                if low[part] == number[part]:
                    component: list[Part] = []
                    while not component or component[-1] != part:
                        component.append(open_parts.popitem()[0])
                    if len(component) > 1:
                        yield component
            elif following not in number:
                number[following] = low[following] = len(number)
                open_parts[following] = None
                work.append((following, iter(after[following])))
            elif following in open_parts:
                low[part] = min(low[part], number[following])

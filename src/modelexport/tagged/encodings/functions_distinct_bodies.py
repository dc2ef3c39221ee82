"""Finds grouped calls with equal bodies, and the inputs and outputs of each common body.

Bodies are equal if their nodes are, one by one: operator, attributes, connections, types of outputs, owners relative to
the call, and the bodies of the calls inside. Values from outside may differ, and two of them may be the same value in
one call but not in another: the common body has an input for each value that is distinct in at least one call.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from modelexport.core.relative_addresses import Scope
from modelexport.core.tags import CallTags
from modelexport.format import keys
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import nested_graphs
from modelexport.graph.properties import properties_of
from modelexport.tagged.encodings.functions_call_groups import Group, Grouping, Item

CONSTANT_LIMIT = 256
"""The size up to which an initializer that all calls share becomes a constant of the body."""


@dataclass(eq=False)
class Instance:
    """One call that becomes one node. The root becomes the main graph."""

    group: Group
    height: int
    """The nesting depth of the functions called in it."""
    last: int
    """The number of its last node, in the order in which all nodes run."""
    key: Hashable = None
    slots: list[ir.Value] = field(default_factory=list)
    """The uses of values from outside, in the order of the walk."""
    produced: list[ir.Value] = field(default_factory=list)
    """The outputs of its items."""
    walk: list[ir.Node | ir.Value | Instance] = field(default_factory=list)
    """Its nodes, those of nested graphs before their enclosing node, each followed by its outputs; inputs and
    initializers of nested graphs; and the calls inside, each of which continues with its own walk."""
    variant: Variant | None = None

    def inputs(self) -> list[ir.Value]:
        """The values for the inputs of its function."""
        return [self.slots[slot] for slot in self._variant.inputs]

    def constants(self) -> list[ir.Value]:
        """The initializers that are constants in its function."""
        return [self.slots[slot] for slot in self._variant.constants]

    def outputs(self) -> list[ir.Value]:
        """The outputs of its function."""
        return [self.produced[index] for index in self._variant.outputs]

    @property
    def _variant(self) -> Variant:
        assert self.variant is not None
        return self.variant


@dataclass(eq=False)
class Variant:
    """The common structure of equal instances, which becomes a function."""

    members: list[Instance]
    inputs: list[int] = field(default_factory=list)
    """For each input of the function, one of the slots that use it."""
    constants: list[int] = field(default_factory=list)
    """For each constant, one of the slots that use it."""
    fills: list[int] = field(default_factory=list)
    """For each slot, the index of its value among the inputs followed by the constants."""
    outputs: list[int] = field(default_factory=list)
    """The outputs, as indices into the values that an instance produces."""


@dataclass(eq=False)
class Distinct:
    """The main graph and the functions that it needs."""

    root: Instance
    instances: dict[Group, Instance]
    variants: list[Variant]
    """The functions, callees before callers."""


def merge_equal_constants(graph: ir.Graph) -> None:
    """Let nodes that use equal small constants use one, in place: bodies that are equal but for them become one."""
    first: dict[Hashable, ir.Value] = {}
    for value in list(graph.initializers.values()):
        if is_small_constant(value):
            assert value.const_value is not None
            same = first.setdefault(_tensor_key(value.const_value), value)
            if same is not value:
                value.replace_all_uses_with(same)
                del graph.initializers[value.name or ""]


def is_small_constant(value: ir.Value) -> bool:
    """Whether a value is a small initializer of the main graph without metadata except its users."""
    tensor = value.const_value
    return (
        value.is_initializer()
        and tensor is not None
        and not isinstance(tensor, ir.ExternalTensor)
        and tensor.nbytes <= CONSTANT_LIMIT
        and not (value.is_graph_input() or value.is_graph_output())
        and not kept_properties(value)
    )


def distinct_bodies(model: ir.Model, tags: CallTags, grouping: Grouping) -> Distinct:
    """Find the distinct bodies among the groups of a model whose nodes have owners."""
    return _Search(model, tags, grouping).run()


class _Search:
    def __init__(self, model: ir.Model, tags: CallTags, grouping: Grouping) -> None:
        self.tags = tags
        self.graph = model.graph
        self.items = grouping.items
        self.instances: dict[Group, Instance] = {}
        self.last_use: dict[ir.Value, float] = {}
        self.counter = 0

    def run(self) -> Distinct:
        root = self._number(Group(self.tags.calls.calls[0].call, self.items[self.graph]))
        self.last_use.update(dict.fromkeys(self.graph.outputs, math.inf))
        order = {traced.call: index for index, traced in enumerate(self.tags.calls)}
        by_height: dict[int, list[Instance]] = defaultdict(list)
        for instance in self.instances.values():
            if instance is not root:
                by_height[instance.height].append(instance)
        variants: list[Variant] = []
        for height in sorted(by_height):
            equal: dict[Hashable, list[Instance]] = {}
            for instance in sorted(by_height[height], key=lambda instance: order[instance.group.call]):
                self._encode(instance, ())
                equal.setdefault(instance.key, []).append(instance)
            variants.extend(self._variant(members) for members in equal.values())
        self._encode(root, [*self.graph.inputs, *self.graph.initializers.values()])
        root.variant = Variant([root])
        return Distinct(root, self.instances, variants)

    def _number(self, group: Group) -> Instance:
        height = max((self._visit(item) for item in group.items), default=0)
        instance = self.instances[group] = Instance(group, height, self.counter)
        return instance

    def _visit(self, item: Item) -> int:
        """Number the nodes of an item, record the last use of each value, and return the nesting depth of functions."""
        if isinstance(item, Group):
            return self._number(item).height + 1
        height = 0
        for graph in nested_graphs(item):
            height = max([height, *(self._visit(inner) for inner in self.items[graph])])
        self.counter += 1
        for graph in nested_graphs(item):
            self.last_use.update(dict.fromkeys(graph.outputs, self.counter))
        self.last_use.update((value, self.counter) for value in item.inputs if value is not None)
        return height

    def _encode(self, instance: Instance, known: Collection[ir.Value]) -> None:
        encoding = _Encoding(self.items, self.instances, Scope(self.tags, instance.group.call), known)
        instance.key = encoding.encode(instance.group.items)
        instance.slots, instance.produced, instance.walk = encoding.slots, encoding.produced, encoding.walk

    def _variant(self, members: list[Instance]) -> Variant:
        slots = list(zip(*(member.slots for member in members), strict=True))
        first: dict[tuple[ir.Value, ...], int] = {}
        for slot, values in enumerate(slots):
            first.setdefault(values, slot)
        constants = [values for values in first if len({*values}) == 1 and is_small_constant(values[0])]
        taken = set(constants)
        inputs = [values for values in first if values not in taken]
        inputs.sort(key=lambda values: all(value.is_initializer() for value in values))  # weights last
        index = {values: index for index, values in enumerate([*inputs, *constants])}
        variant = Variant(
            members,
            inputs=[first[values] for values in inputs],
            constants=[first[values] for values in constants],
            fills=[index[values] for values in slots],
            outputs=[
                output
                for output, values in enumerate(zip(*(member.produced for member in members), strict=True))
                if any(self.last_use.get(v, 0) > member.last for v, member in zip(values, members, strict=True))
            ],
        )
        if not variant.outputs:  # its outputs are unused; a node must have an output nevertheless
            variant.outputs = [len(members[0].produced) - 1]
        for member in members:
            member.variant = variant
        return variant


class _Encoding:
    """Encodes the structure of an instance as a value that can be compared."""

    def __init__(
        self,
        items: dict[ir.Graph, list[Item]],
        instances: dict[Group, Instance],
        scope: Scope,
        known: Collection[ir.Value],
    ) -> None:
        self.items = items
        self.instances = instances
        self.scope = scope
        self.numbers = {value: number for number, value in enumerate(known)}
        self.slots: list[ir.Value] = []
        self.produced: list[ir.Value] = []
        self.walk: list[ir.Node | ir.Value | Instance] = []

    def encode(self, items: Sequence[Item]) -> Hashable:
        encoded = []
        for item in items:
            encoded.append(self._call(item) if isinstance(item, Group) else self._node(item))
            self.produced.extend(self.instances[item].outputs() if isinstance(item, Group) else item.outputs)
        return tuple(encoded)

    def _value(self, value: ir.Value | None) -> Hashable:
        if value is None or value in self.numbers:
            return None if value is None else self.numbers[value]
        self.slots.append(value)
        return "outside"

    def _define(self, value: ir.Value) -> Hashable:
        self.numbers[value] = len(self.numbers)
        return bool(value.name), str(value.type)

    def _call(self, group: Group) -> Hashable:
        instance = self.instances[group]
        inputs = tuple(self._value(value) for value in instance.inputs())
        self.walk.append(instance)
        for value in instance.outputs():
            self._define(value)
        return id(instance.variant), inputs, self.scope.address(group.call), self.scope.tag(group.call)

    def _node(self, node: ir.Node) -> Hashable:
        owner = owner_of(node)
        assert owner is not None
        inputs = tuple(self._value(value) for value in node.inputs)
        attributes = tuple((name, self._attribute(attribute)) for name, attribute in sorted(node.attributes.items()))
        self.walk.extend((node, *node.outputs))
        outputs = tuple(self._define(value) for value in node.outputs)
        owners = tuple((self.scope.address(call), self.scope.tag(call)) for call in owner.calls)
        return node.op_identifier(), node.version, inputs, attributes, outputs, owners, owner.evidence

    def _attribute(self, attribute: ir.Attr) -> Hashable:
        if attribute.is_ref():
            return attribute.type, attribute.ref_attr_name
        if attribute.type == ir.AttributeType.GRAPH:
            return self._graph(attribute.as_graph())
        if attribute.type == ir.AttributeType.GRAPHS:
            return tuple(self._graph(graph) for graph in attribute.as_graphs())
        if attribute.type == ir.AttributeType.TENSOR:
            return _tensor_key(attribute.as_tensor())
        if attribute.type == ir.AttributeType.TENSORS:
            return tuple(_tensor_key(tensor) for tensor in attribute.as_tensors())
        # repr distinguishes -0.0 from 0.0, is equal for two nans, and is the same for tuples and lists of the same type
        return attribute.type, repr(attribute.value)

    def _graph(self, graph: ir.Graph) -> Hashable:
        defined = []
        for value in (*graph.inputs, *graph.initializers.values()):
            self.walk.append(value)
            tensor = value.const_value
            known = tuple(sorted(kept_properties(value).items()))
            defined.append((self._define(value), None if tensor is None else _tensor_key(tensor), known))
        produced, self.produced = self.produced, []
        items = self.encode(self.items[graph])
        self.produced = produced
        return len(graph.inputs), tuple(defined), items, tuple(self._value(value) for value in graph.outputs)


def kept_properties(initializer: ir.Value) -> dict[str, str]:
    """The properties of an initializer that do not follow from its users."""
    return {key: text for key, text in properties_of(initializer).items() if key != keys.HIERARCHY_TAGS}


def _tensor_key(tensor: ir.TensorProtocol) -> Hashable:
    return tensor.dtype, tuple(tensor.shape), hashlib.sha256(tensor.tobytes()).digest()

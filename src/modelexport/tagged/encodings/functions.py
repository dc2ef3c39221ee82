"""The `functions` encoding: one ONNX local function for each distinct module, called wherever an equal one ran.

    main graph   BertLayer(hidden, mask, weights...)               the call encoder.layer.0
                 BertLayer(hidden, mask, weights...)               the call encoder.layer.1
    BertLayer    BertAttention(...), BertIntermediate(...), ...    the calls attention, intermediate, ... inside

Every call is built as a function, from the inside out, and equal functions become one. Values from outside the call
(weights and activations) are inputs. Small constants are ``Constant`` nodes of each call that uses them. Tags and
addresses in a body are relative to the call. Bodies have no names of their own to keep: nodes and values of the flat
graph are named after their modules, and a reader names them in the same way.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.owners import Evidence, Owner
from modelexport.core.relative_addresses import Scope
from modelexport.core.tags import CallTags
from modelexport.errors import FileFormatError
from modelexport.format import keys
from modelexport.format.node_tags import NODE_KEYS, owner_properties, tag_properties
from modelexport.graph.bound_tensors import bind_tensors
from modelexport.graph.copies import model_like, value_like, with_graphs
from modelexport.graph.names_by_module import name_by_path
from modelexport.graph.node_owners import required_owner, set_owner
from modelexport.graph.nodes import all_nodes, nested_graphs
from modelexport.graph.parameter_plans import parameter_plan
from modelexport.graph.properties import properties_of, put_texts
from modelexport.graph.unique_names import free_name
from modelexport.tagged.encodings.functions_call_groups import Group, Item, group_calls
from modelexport.tagged.encodings.metadata import write_calls

_FUNCTION_VALUE_INFO_IR_VERSION = 10
"""The first IR version in which functions have types and shapes of their values."""
_CONSTANT_BYTES = 256
"""The size up to which a constant is written where it is used."""


@dataclass(frozen=True)
class FunctionsModel:
    """A model with functions, and the calls that could not become functions."""

    model: ir.Model
    flat: Sequence[ModuleCall]


def write_functions(model: ir.Model, tags: CallTags) -> FunctionsModel:
    """Convert a flat model with owners and metadata to functions; tensors are shared.

    Args:
        model: Changed in place to what a reader makes of the functions: its nodes are in the order of the calls, small
            constants are nodes, and names follow from modules.
    """
    _put_constants_where_used(model, tags)
    write_calls(model, tags)
    grouping = group_calls(model, tags.calls)
    for graph, items in grouping.items.items():
        graph.remove(list(graph))
        graph.extend(_nodes_in(items))
    name_by_path(model)
    return FunctionsModel(_Writer(model, tags, grouping.items).run(), grouping.flat)


def _put_constants_where_used(model: ir.Model, tags: CallTags) -> None:
    """Replace small initializers without a name to keep by ``Constant`` nodes of the calls that use them, in place."""
    constants = {value for value in model.graph.initializers.values() if _is_small_constant(value)}
    written: dict[Hashable, ir.Value] = {}
    for user in list(all_nodes(model)):
        for index, value in enumerate(user.inputs):
            if value is None or value not in constants:
                continue
            owner = required_owner(user)
            place = value, user.graph, owner.calls
            if place not in written:
                assert user.graph is not None
                output = value_like(value, f"{value.name}.{len(written)}")
                tensor = copy(value.const_value)
                assert tensor is not None
                tensor.name = ""  # equal constants are equal nodes
                constant = ir.node("Constant", [], {"value": tensor}, outputs=[output])
                set_owner(constant, owner)
                put_texts(constant, owner_properties(owner, tags))
                user.graph.insert_before(user, constant)
                written[place] = output
            user.replace_input_with(index, written[place])
    for value in constants:
        del model.graph.initializers[value.name or ""]


def _is_small_constant(value: ir.Value) -> bool:
    tensor = value.const_value
    return (
        tensor is not None
        and not isinstance(tensor, ir.ExternalTensor)
        and tensor.nbytes <= _CONSTANT_BYTES
        and not (value.is_graph_input() or value.is_graph_output())
        and not _kept_properties(value)
    )


def _kept_properties(initializer: ir.Value) -> dict[str, str]:
    """The properties of an initializer that do not follow from its users."""
    return {key: text for key, text in properties_of(initializer).items() if key != keys.HIERARCHY_TAGS}


def _nodes_in(items: Iterable[Item]) -> Iterator[ir.Node]:
    for item in items:
        if isinstance(item, Group):
            yield from _nodes_in(item.items)
        else:
            yield item


class _Writer:
    def __init__(self, model: ir.Model, tags: CallTags, items: Mapping[ir.Graph, list[Item]]) -> None:
        self.model, self.tags, self.items = model, tags, items
        self.root = Group(tags.calls.calls[0].call, items[model.graph])
        self.bodies: dict[Group, _Body] = {}
        self.functions: list[ir.Function] = []
        """Callees before callers."""
        self._names: set[str] = set()

    def run(self) -> ir.Model:
        by_height: dict[int, list[Group]] = defaultdict(list)
        self._add_heights(self.root.items, by_height)
        order = {traced.call: index for index, traced in enumerate(self.tags.calls)}
        for height in sorted(by_height):
            equal: dict[Hashable, list[_Body]] = {}
            for group in sorted(by_height[height], key=lambda group: order[group.call]):
                self.bodies[group] = body = _Body(self, group)
                equal.setdefault(body.key(), []).append(body)
            for bodies in equal.values():
                self._add_function(bodies)
        written = model_like(self.model, self._main_graph(), [*self.model.functions.values(), *self.functions])
        put_texts(written, {keys.ENCODING: "functions"})
        written.ir_version = max(self.model.ir_version, _FUNCTION_VALUE_INFO_IR_VERSION)
        return written

    def _add_heights(self, items: Iterable[Item], by_height: dict[int, list[Group]]) -> int:
        """Sort the groups in some items by the nesting depth of the functions in them; returns that of the items."""
        height = 0
        for item in items:
            if isinstance(item, Group):
                inside = self._add_heights(item.items, by_height)
                by_height[inside].append(item)
                height = max(height, inside + 1)
            else:
                inner = (self._add_heights(self.items[graph], by_height) for graph in nested_graphs(item))
                height = max([height, *inner])
        return height

    def _add_function(self, bodies: Sequence[_Body]) -> None:
        """Write the function of calls with equal bodies; its name is the class of the first."""
        first = bodies[0]
        name = free_name(self.tags.class_of(first.group.call), self._names, first=1)
        leaving = {place for body in bodies for place, value in enumerate(body.computed) if body.is_used_outside(value)}
        for body in bodies:  # a node must have an output, also if nothing uses it
            body.name = name
            body.outputs = [body.computed[place] for place in sorted(leaving or {len(body.computed) - 1})]
        self.functions.append(first.function(bodies))

    def _main_graph(self) -> ir.Graph:
        graph = self.model.graph
        values: dict[ir.Value, ir.Value] = {}
        for value in (*graph.inputs, *graph.initializers.values()):
            if value not in values:
                values[value] = _copied(value, value.shape, value.const_value)
                put_texts(values[value], _kept_properties(value))
        body = _Body(self, self.root, values)
        main = ir.Graph(
            [values[value] for value in graph.inputs],
            [values[value] for value in graph.outputs],
            nodes=body.nodes,
            initializers=[values[value] for value in graph.initializers.values()],
            doc_string=graph.doc_string,
            opset_imports=dict(graph.opset_imports) | ({keys.FUNCTIONS_DOMAIN: 1} if self.functions else {}),
            name=graph.name,
        )
        put_texts(main, properties_of(graph))
        return main


class _Body:
    """The nodes of a call as those of a function, or of the main graph.

    Args:
        values: For the main graph, its inputs and initializers to their copies.
    """

    def __init__(self, writer: _Writer, group: Group, values: dict[ir.Value, ir.Value] | None = None) -> None:
        self.writer, self.group = writer, group
        self.scope = Scope(writer.tags, group.call)
        self.name = ""
        """The name of the function."""
        self.values = {} if values is None else values
        """Values of the flat graph to those of the body."""
        self.inputs: list[ir.Value] = []
        """The values of the flat graph that come from outside, initializers last."""
        self.computed: list[ir.Value] = []
        """The values of the flat graph that the body computes, without those of nested graphs."""
        self.outputs: list[ir.Value] = []
        """The values that other calls use, from this call or from one with an equal body."""
        self.copies: dict[ir.Node, ir.Node] = {}
        """Nodes of the flat graph to those of the body, without calls."""
        self.callees: list[_Body] = []
        self.nodes = self._items(group.items)
        self.inputs.sort(key=ir.Value.is_initializer)
        for item in group.items:
            self.computed += writer.bodies[item].outputs if isinstance(item, Group) else item.outputs

    def key(self) -> Hashable:
        """A key that equal bodies share: everything except names, shapes, and properties of other tools."""
        nodes = b"".join(ir.serde.serialize_node(node).SerializeToString() for node in self.nodes)
        types = [str(value.type) for value in self.values.values()]
        inputs = [(self.values[value].name, value.is_initializer()) for value in self.inputs]
        return hashlib.sha256(nodes).digest(), tuple(types), tuple(inputs)

    def function(self, equal: Sequence[_Body]) -> ir.Function:
        """The function, with the names of this call, and the shapes and properties that all equal calls have."""
        inputs = set(self.inputs)
        for values in zip(*(body.values for body in equal), strict=True):
            if values[0] not in inputs:
                self.values[values[0]].name = values[0].name
                self.values[values[0]].shape = _common_shape(values)
        for nodes in zip(*(body.copies for body in equal), strict=True):
            copied, common = self.copies[nodes[0]], set.intersection(*(set(properties_of(n).items()) for n in nodes))
            copied.name = nodes[0].name
            put_texts(copied, {key: text for key, text in common if key not in NODE_KEYS})
        taken = {value.name for value in self.values if value not in inputs}
        for value in self.inputs:
            self.values[value].name = free_name(_input_name(value, self.group.call), taken, first=1)
        opsets = {**self.writer.model.opset_imports, keys.FUNCTIONS_DOMAIN: 1}
        parameters = [
            ir.Attr(keys.SOURCE_MODULE_ATTRIBUTE, ir.AttributeType.STRING, None),
            ir.Attr(keys.HIERARCHY_TAGS_ATTRIBUTE, ir.AttributeType.STRINGS, None),
        ]
        ports = ([self.values[value] for value in values] for values in (self.inputs, self.outputs))
        graph = ir.Graph(*ports, nodes=self.nodes, opset_imports=opsets)
        return ir.Function(keys.FUNCTIONS_DOMAIN, self.name, graph=graph, attributes=parameters)

    def is_used_outside(self, value: ir.Value) -> bool:
        """Whether a value that the body computes is used by other calls, or is a result of a graph."""
        return value.is_graph_output() or any(not self.has(user) for user, _ in value.uses())

    def has(self, node: ir.Node) -> bool:
        """Whether a node is in the body, or in that of a call inside."""
        return node in self.copies or any(callee.has(node) for callee in self.callees)

    def _items(self, items: Sequence[Item]) -> list[ir.Node]:
        return [self._call(item) if isinstance(item, Group) else self._node(item) for item in items]

    def _value(self, value: ir.Value | None) -> ir.Value | None:
        """The body's value for one of the flat graph; one that is not known comes from outside."""
        if value is None:
            return None
        if value not in self.values:
            if self.scope.is_root:
                raise FileFormatError(f"nodes use '{value.name}', which nothing computes: the file is damaged")
            self.values[value] = ir.Value(name=str(len(self.values)))
            self.inputs.append(value)
        return self.values[value]

    def _define(self, value: ir.Value) -> ir.Value:
        """A new value of the body. In a function it has a number for its name until the function is written."""
        copied = _copied(value, value.shape if self.scope.is_root else None)
        if value.name and not self.scope.is_root:
            copied.name = str(len(self.values))
        self.values[value] = copied
        return copied

    def _call(self, group: Group) -> ir.Node:
        callee = self.writer.bodies[group]
        self.callees.append(callee)
        properties = self._properties(Owner((group.call,), Evidence.EXACT))
        tag = properties[keys.SOURCE_MODULE]
        if self.scope.is_root:
            properties[keys.NAMESPACE] = self.writer.tags.namespace(group.call)
            properties[keys.LAYER_ANNOTATION] = group.call.annotation
        called = ir.Node(
            keys.FUNCTIONS_DOMAIN,
            callee.name,
            [self._value(value) for value in callee.inputs],
            [ir.AttrString(keys.SOURCE_MODULE_ATTRIBUTE, tag), ir.AttrStrings(keys.HIERARCHY_TAGS_ATTRIBUTE, [tag])],
            outputs=[self._define(value) for value in callee.outputs],
            name=properties[keys.CALL],
        )
        put_texts(called, properties)
        return called

    def _node(self, node: ir.Node) -> ir.Node:
        inputs = [self._value(value) for value in node.inputs]
        attributes = [with_graphs(attribute, self._graph) for attribute in node.attributes.values()]
        self.copies[node] = copied = ir.Node(
            node.domain,
            node.op_type,
            inputs,
            attributes,
            overload=node.overload,
            outputs=[self._define(value) for value in node.outputs],
            version=node.version,
            name=node.name if self.scope.is_root else None,
            doc_string=node.doc_string,
        )
        put_texts(copied, properties_of(node) if self.scope.is_root else self._properties(required_owner(node)))
        return copied

    def _graph(self, graph: ir.Graph) -> ir.Graph:
        inputs = [self._define(value) for value in graph.inputs]
        initializers = [self._define(value) for value in graph.initializers.values()]
        for value, original in zip(initializers, graph.initializers.values(), strict=True):
            if original.const_value is not None:
                bind_tensors({value: original.const_value})
            put_texts(value, _kept_properties(original))
        nodes = self._items(self.writer.items[graph])
        outputs = [value for value in map(self._value, graph.outputs) if value is not None]
        name = graph.name if self.scope.is_root else "body"
        return ir.Graph(inputs, outputs, nodes=nodes, initializers=initializers, name=name)

    def _properties(self, owner: Owner) -> dict[str, str]:
        addresses = [self.scope.address(call) for call in owner.calls]
        tags = [self.scope.tag(call) for call in owner.calls]
        return tag_properties(addresses, tags, owner.evidence, owner.line)


def _common_shape(values: Sequence[ir.Value]) -> ir.Shape | None:
    """The dimensions on which the shapes of all values agree."""
    shapes = [value.shape for value in values]
    first = shapes[0]
    if first is None or any(shape is None or len(shape) != len(first) for shape in shapes):
        return None
    sizes = zip(*(shape for shape in shapes if shape is not None), strict=True)
    return ir.Shape([same[0] if len(set(same)) == 1 else None for same in sizes])


def _copied(value: ir.Value, shape: ir.Shape | None, tensor: ir.TensorProtocol | None = None) -> ir.Value:
    copied = ir.Value(
        name=value.name, type=value.type, shape=None if shape is None else shape.copy(), const_value=tensor
    )
    copied.meta.update(value.meta)
    return copied


def _input_name(value: ir.Value, call: ModuleCall) -> str:
    """The name of a parameter in its module, or the value's own."""
    plan = parameter_plan(value)
    entries = plan.keys if plan is not None else []
    below = [key.removeprefix(f"{call.path}.") for key in entries if key.startswith(f"{call.path}.")]
    return below[0] if len(below) == 1 else value.name or ""

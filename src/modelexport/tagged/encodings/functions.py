"""The `functions` encoding: one ONNX local function for each distinct module, called wherever an equal one ran.

    main graph   BertLayer(hidden, mask, weights...)               the call encoder.layer.0
                 BertLayer(hidden, mask, weights...)               the call encoder.layer.1
    BertLayer    BertAttention(...), BertIntermediate(...), ...    the calls attention, intermediate, ... inside

Values that differ between the calls (weights and activations) are inputs. Small constants that all calls share are in
the body as ``Constant`` nodes. Tags and addresses in a body are relative to the call. Bodies have no names of their
own to keep: nodes and values of the flat graph are named after their modules, and a reader names them in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.owners import Evidence, Owner
from modelexport.core.relative_addresses import Scope
from modelexport.core.tags import CallTags
from modelexport.errors import FileFormatError
from modelexport.format import keys
from modelexport.format.call_tree import call_tree_entries, encode_call_tree
from modelexport.format.node_tags import NODE_KEYS, tag_properties
from modelexport.format.repeated_calls import fold_repeats
from modelexport.graph.copies import model_like, with_graphs
from modelexport.graph.hidden_weights import bind_tensors
from modelexport.graph.names_by_module import name_by_path
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import nested_graphs
from modelexport.graph.parameter_plans import parameter_plan
from modelexport.graph.properties import properties_of, put_texts
from modelexport.graph.unique_names import free_name
from modelexport.tagged.encodings.functions_call_groups import FlatCall, Group, Grouping, Hoisted, Item, group_calls
from modelexport.tagged.encodings.functions_distinct_bodies import (
    Distinct,
    Instance,
    Variant,
    distinct_bodies,
    kept_properties,
    merge_equal_constants,
)
from modelexport.tagged.encodings.metadata import write_calls

_FUNCTION_VALUE_INFO_IR_VERSION = 10
"""The first IR version in which functions have types and shapes of their values."""


@dataclass(frozen=True)
class FunctionsModel:
    """A model with functions, and the calls that could not become functions."""

    model: ir.Model
    flat: Sequence[FlatCall]
    hoisted: Sequence[Hoisted]


def write_functions(model: ir.Model, tags: CallTags) -> FunctionsModel:
    """Convert a flat model with owners and metadata to functions; tensors are shared.

    Args:
        model: Changed in place to what a reader makes of the functions: its nodes are in the order of the calls, equal
            small constants are one, and names follow from modules.
    """
    merge_equal_constants(model.graph)
    write_calls(model, tags)
    grouping = group_calls(model, tags.calls)
    for graph, items in grouping.items.items():
        graph.remove(list(graph))
        graph.extend(_in_order(items))
    names = name_by_path(model)
    reports: list[FlatCall | Hoisted] = [*grouping.flat, *grouping.hoisted]
    for reported in reports:
        reported.values = [names.get(name, name) for name in reported.values]
    return FunctionsModel(_Writer(model, tags, grouping).run(), grouping.flat, grouping.hoisted)


def _in_order(items: Iterable[Item]) -> Iterator[ir.Node]:
    for item in items:
        if isinstance(item, Group):
            yield from _in_order(item.items)
        else:
            yield item


class _Writer:
    def __init__(self, model: ir.Model, tags: CallTags, grouping: Grouping) -> None:
        self.model = model
        self.tags = tags
        self.items = grouping.items
        self.distinct: Distinct = distinct_bodies(model, tags, grouping)
        self.instances = self.distinct.instances
        self.names = self._function_names()

    def run(self) -> ir.Model:
        functions = [self._function(variant) for variant in self.distinct.variants]
        written = model_like(self.model, self._main_graph(), [*self.model.functions.values(), *functions])
        put_texts(written, {keys.ENCODING: "functions", keys.CALL_TREE: self._call_tree()})
        written.ir_version = max(self.model.ir_version, _FUNCTION_VALUE_INFO_IR_VERSION)
        return written

    def _function_names(self) -> dict[Variant, str]:
        """The class that most of its calls have, with a number for the second function of this name."""
        order = {traced.call: index for index, traced in enumerate(self.tags.calls)}
        names: dict[Variant, str] = {}
        taken: set[str] = set()
        for variant in sorted(self.distinct.variants, key=lambda variant: order[variant.members[0].group.call]):
            classes = Counter(self.tags.class_of(member.group.call) for member in variant.members)
            names[variant] = free_name(classes.most_common(1)[0][0], taken, first=1)
        return names

    def _call_tree(self) -> str:
        equal = [[member.group.call.address for member in variant.members] for variant in self.distinct.variants]
        return encode_call_tree(fold_repeats(call_tree_entries(self.tags), equal))

    def _main_graph(self) -> ir.Graph:
        graph = self.model.graph
        env: dict[ir.Value, ir.Value] = {}
        for value in (*graph.inputs, *graph.initializers.values()):
            if value not in env:
                env[value] = _copied(value, value.shape, value.const_value)
                put_texts(env[value], kept_properties(value))
        nodes = _Body(self, self.distinct.root, env, ()).build()
        outputs = [env[value] for value in graph.outputs]
        embedded = {
            value for variant in self.distinct.variants for member in variant.members for value in member.constants()
        }
        main = ir.Graph(
            [env[value] for value in graph.inputs],
            outputs,
            nodes=nodes,
            initializers=[
                env[value]
                for value in graph.initializers.values()
                if value not in embedded or env[value].uses() or value.is_graph_output()
            ],
            doc_string=graph.doc_string,
            opset_imports=dict(graph.opset_imports) | ({keys.FUNCTIONS_DOMAIN: 1} if self.distinct.variants else {}),
            name=graph.name,
        )
        put_texts(main, properties_of(graph))
        return main

    def _function(self, variant: Variant) -> ir.Function:
        first = variant.members[0]
        names = {value.name or "" for value in (*first.produced, *first.walk) if isinstance(value, ir.Value)}
        wanted_names = [_input_name(value, first.group.call) for value in first.inputs()]
        inputs = [ir.Value(name=free_name(name, names, first=1)) for name in wanted_names]
        constants = [_constant(value, free_name(value.name or "", names, first=1)) for value in first.constants()]
        env: dict[ir.Value, ir.Value] = {}
        nodes = [*constants, *_Body(self, first, env, [*inputs, *(node.outputs[0] for node in constants)]).build()]
        graph = ir.Graph(
            inputs, [env[value] for value in first.outputs()], nodes=nodes, opset_imports=self._opsets(nodes)
        )
        parameters = [
            ir.Attr(keys.SOURCE_MODULE_ATTRIBUTE, ir.AttributeType.STRING, None),
            ir.Attr(keys.HIERARCHY_TAGS_ATTRIBUTE, ir.AttributeType.STRINGS, None),
        ]
        return ir.Function(keys.FUNCTIONS_DOMAIN, self.names[variant], graph=graph, attributes=parameters)

    def _opsets(self, nodes: Sequence[ir.Node]) -> dict[str, int]:
        pending, domains = list(nodes), {""}
        while pending:
            node = pending.pop()
            domains.add(node.domain)
            for graph in nested_graphs(node):
                pending.extend(graph)
        versions = {**self.model.opset_imports, keys.FUNCTIONS_DOMAIN: 1}
        return {domain: versions[domain] for domain in sorted(domains) if domain in versions}


class _Body:
    """Builds the nodes of a function, or of the main graph, from the first of the calls that share it.

    Args:
        env: Values of the flat graph to those of the body; filled during the walk.
        outside: The function's inputs and constants.
    """

    def __init__(
        self, writer: _Writer, instance: Instance, env: dict[ir.Value, ir.Value], outside: Sequence[ir.Value]
    ) -> None:
        assert instance.variant is not None
        self.writer = writer
        self.instance = instance
        self.scope = Scope(writer.tags, instance.group.call)
        self.env = env
        self.fills: Iterator[ir.Value] = (outside[index] for index in instance.variant.fills)
        self.steps = zip(*(member.walk for member in instance.variant.members), strict=True)

    def build(self) -> list[ir.Node]:
        return self._items(self.instance.group.items)

    def _items(self, items: Sequence[Item]) -> list[ir.Node]:
        return [self._call(item) if isinstance(item, Group) else self._node(item) for item in items]

    def _value(self, value: ir.Value | None) -> ir.Value | None:
        if value is None:
            return None
        filled = self.env[value] if value in self.env else next(self.fills, None)
        if filled is None:
            raise FileFormatError(f"nodes use '{value.name}', which nothing computes: the file is damaged")
        return filled

    def _define(self) -> ir.Value:
        """The next value of the walk."""
        values = [value for value in next(self.steps) if isinstance(value, ir.Value)]
        self.env[values[0]] = _copied(values[0], _common_shape(values))
        return self.env[values[0]]

    def _call(self, group: Group) -> ir.Node:
        duplicates = [instance for instance in next(self.steps) if isinstance(instance, Instance)]
        instance = self.writer.instances[group]
        assert instance.variant is not None
        inputs = [self._value(value) for value in instance.inputs()]
        for values in zip(*(duplicate.outputs() for duplicate in duplicates), strict=True):
            self.env[values[0]] = _copied(values[0], _common_shape(values))
        properties = self._properties(Owner((group.call,), Evidence.EXACT))
        tag = properties[keys.SOURCE_MODULE]
        if self.scope.is_root:
            properties[keys.NAMESPACE] = self.writer.tags.namespace(group.call)
            properties[keys.LAYER_ANNOTATION] = group.call.annotation
        called = ir.Node(
            keys.FUNCTIONS_DOMAIN,
            self.writer.names[instance.variant],
            inputs,
            [ir.AttrString(keys.SOURCE_MODULE_ATTRIBUTE, tag), ir.AttrStrings(keys.HIERARCHY_TAGS_ATTRIBUTE, [tag])],
            outputs=[self.env[value] for value in instance.outputs()],
            name=properties[keys.CALL],
        )
        put_texts(called, properties)
        return called

    def _node(self, node: ir.Node) -> ir.Node:
        owner = owner_of(node)
        assert owner is not None
        inputs = [self._value(value) for value in node.inputs]
        attributes = [with_graphs(attribute, self._graph) for _, attribute in sorted(node.attributes.items())]
        duplicates = [duplicate for duplicate in next(self.steps) if isinstance(duplicate, ir.Node)]
        if self.scope.is_root:
            properties = properties_of(node)
        else:
            common = set.intersection(*(set(properties_of(each).items()) for each in (node, *duplicates)))
            properties = {key: value for key, value in common if key not in NODE_KEYS} | self._properties(owner)
        copied = ir.Node(
            node.domain,
            node.op_type,
            inputs,
            attributes,
            overload=node.overload,
            outputs=[self._define() for _ in node.outputs],
            version=node.version,
            name=node.name,
            doc_string=node.doc_string,
        )
        put_texts(copied, properties)
        return copied

    def _graph(self, graph: ir.Graph) -> ir.Graph:
        inputs = [self._define() for _ in graph.inputs]
        initializers = [self._define() for _ in graph.initializers]
        for value, original in zip(initializers, graph.initializers.values(), strict=True):
            if original.const_value is not None:
                bind_tensors({value: original.const_value})
            put_texts(value, kept_properties(original))
        nodes = self._items(self.writer.items[graph])
        outputs = [self._value(value) for value in graph.outputs]
        return ir.Graph(
            inputs,
            [value for value in outputs if value is not None],
            nodes=nodes,
            initializers=initializers,
            name=graph.name,
        )

    def _properties(self, owner: Owner) -> dict[str, str]:
        addresses = [self.scope.address(call) for call in owner.calls]
        return tag_properties(addresses, [self.scope.tag(call) for call in owner.calls], owner.evidence)


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


def _constant(value: ir.Value, name: str) -> ir.Node:
    assert value.const_value is not None
    output = _copied(value, value.shape)
    output.name = name
    constant = ir.Node(
        "",
        "Constant",
        [],
        [ir.AttrTensor("value", value.const_value)],
        outputs=[output],
        name=name,
    )
    put_texts(constant, {**tag_properties(["."], [""], Evidence.EXACT), keys.INITIALIZER: value.name or ""})
    return constant


def _input_name(value: ir.Value, call: ModuleCall) -> str:
    """The name of a parameter in its module, or the value's own."""
    plan = parameter_plan(value)
    entries = plan.keys if plan is not None else []
    below = [key.removeprefix(f"{call.path}.") for key in entries if key.startswith(f"{call.path}.")]
    return below[0] if len(below) == 1 else value.name or ""

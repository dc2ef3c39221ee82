"""Converting the `attributes` and `functions` encodings to metadata of a flat graph, in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from modelexport.core.calls import CallTree, ModuleCall, TracedCall
from modelexport.core.owners import Evidence
from modelexport.core.relative_addresses import full_name, relative_addresses
from modelexport.format import documents, keys
from modelexport.format.node_tags import read_addresses, read_source_tags, tag_properties
from modelexport.graph.copies import value_like, with_graphs
from modelexport.graph.hidden_weights import bind_tensors
from modelexport.graph.nodes import all_nodes, nested_graphs


def unpack_tags(model: ir.Model, entries: Mapping[TracedCall, documents.CallTreeEntry]) -> str:
    """Convert a model of any encoding to the `metadata` encoding, in place; returns its former encoding.

    Args:
        entries: Every call, with what the file records of it.

    Raises:
        KeyError, IndexError, TypeError, ValueError: The encoded tags are damaged.
    """
    encoding = model.metadata_props.pop(keys.ENCODING, "metadata")
    if encoding == "attributes":
        _unpack_attributes(model)
    elif encoding == "functions":
        _Inliner(model, entries).run()
    elif encoding != "metadata":
        raise ValueError(f"unknown encoding '{encoding}'")
    return encoding


def _unpack_attributes(model: ir.Model) -> None:
    for node in all_nodes(model):
        properties = {keys.SOURCE_MODULE: node.attributes.pop(keys.SOURCE_MODULE_ATTRIBUTE).as_string()}
        tags = list(node.attributes.pop(keys.HIERARCHY_TAGS_ATTRIBUTE).as_strings())
        if len(tags) > 1:
            properties[keys.HIERARCHY_TAGS] = json.dumps(tags)
        node.metadata_props.update(properties)


class _Inliner:
    """Inlines the functions at every call, with the names that the values have in the flat graph."""

    def __init__(self, model: ir.Model, entries: Mapping[TracedCall, documents.CallTreeEntry]) -> None:
        self.model = model
        self.calls = CallTree(tuple(entries))
        self.tags = {traced.call: entry.tag for traced, entry in entries.items()}
        self.functions = {
            name: function for name, function in model.functions.items() if name[0] == keys.FUNCTIONS_DOMAIN
        }
        self.restored: dict[str, ir.Value] = {}
        """Initializers that were constants of bodies."""

    def run(self) -> None:
        self._inline(self.model.graph, _Scope(self.calls, self.calls.calls[0].call, ""))
        for value in self.restored.values():
            self.model.graph.initializers.add(value)
        for name in self.functions:
            del self.model.functions[name]
        self.model.opset_imports.pop(keys.FUNCTIONS_DOMAIN, None)

    def _inline(self, graph: ir.Graph, main: _Scope) -> None:
        for node in list(graph):
            if node.op_identifier() not in self.functions:
                for nested in nested_graphs(node):
                    self._inline(nested, main)
                continue
            expansion = _Expansion(self, node)
            nodes, values = expansion.call(node, node.inputs, main)
            graph.insert_before(node, nodes)
            ir.convenience.replace_all_uses_with(node.outputs, values, replace_graph_outputs=True)
            graph.remove(node, safe=True)

    def initializer(self, name: str, constant: ir.Node) -> ir.Value:
        """The initializer of the main graph for a constant of a body."""
        if name in self.model.graph.initializers:
            return self.model.graph.initializers[name]
        if name not in self.restored:
            self.restored[name] = value_like(constant.outputs[0], name, constant.attributes["value"].as_tensor())
        return self.restored[name]


@dataclass(frozen=True)
class _Scope:
    """The call whose body a node is in."""

    calls: CallTree
    call: ModuleCall
    tag: str
    """The prefix of the tags in the body."""

    @cached_property
    def addresses(self) -> Mapping[str, ModuleCall]:
        return {address: call for call, address in relative_addresses(self.calls, self.call).items()}

    def absolute(self, address: str) -> ModuleCall:
        """The call for an address in the body."""
        outside = address.startswith("//") and address not in self.addresses
        return ModuleCall.parse(address[2:]) if outside else self.addresses[address]

    def absolute_tag(self, tag: str) -> str:
        return tag[1:] if tag.startswith("//") else self.tag + tag


class _Expansion:
    """Makes the nodes of one outermost call."""

    def __init__(self, inliner: _Inliner, node: ir.Node) -> None:
        self.inliner = inliner
        self.names: list[str | int | None] = json.loads(node.metadata_props[keys.NAMES])
        self.shapes: dict[str, list[int | str | None] | None] = json.loads(node.metadata_props.get(keys.SHAPES, "{}"))
        self.next_name = 0

    def call(
        self, node: ir.Node, inputs: Sequence[ir.Value | None], outside: _Scope
    ) -> tuple[list[ir.Node], list[ir.Value]]:
        """The nodes of a call, and the values that replace its outputs."""
        function = self.inliner.functions[node.op_identifier()]
        call = outside.addresses[node.metadata_props[keys.CALL]]
        scope = _Scope(outside.calls, call, outside.tag + node.metadata_props[keys.SOURCE_MODULE])
        env: dict[ir.Value, ir.Value] = {
            parameter: value for parameter, value in zip(function.inputs, inputs, strict=True) if value is not None
        }
        nodes = self._nodes(function, env, scope)
        return nodes, [env[output] for output in function.outputs]

    def _nodes(self, nodes: Iterable[ir.Node], env: dict[ir.Value, ir.Value], scope: _Scope) -> list[ir.Node]:
        made: list[ir.Node] = []
        for node in nodes:
            inputs = [None if value is None else env[value] for value in node.inputs]
            if keys.INITIALIZER in node.metadata_props:
                env[node.outputs[0]] = self.inliner.initializer(self._name(node.name), node)
            elif node.op_identifier() in self.inliner.functions:
                inner, values = self.call(node, inputs, scope)
                made.extend(inner)
                env.update(zip(node.outputs, values, strict=True))
            else:
                made.append(self._node(node, inputs, env, scope))
        return made

    def _node(
        self, node: ir.Node, inputs: Sequence[ir.Value | None], env: dict[ir.Value, ir.Value], scope: _Scope
    ) -> ir.Node:
        ordered = [attribute for _, attribute in sorted(node.attributes.items())]
        attributes = [with_graphs(attribute, lambda graph: self._graph(graph, env, scope)) for attribute in ordered]
        return ir.Node(
            node.domain,
            node.op_type,
            inputs,
            attributes,
            overload=node.overload,
            name=self._name(node.name) or None,
            outputs=[self._define(value, env) for value in node.outputs],
            version=node.version,
            doc_string=node.doc_string,
            metadata_props=self._properties(node.metadata_props, scope),
        )

    def _graph(self, graph: ir.Graph, env: dict[ir.Value, ir.Value], scope: _Scope) -> ir.Graph:
        inputs = [self._define(value, env) for value in graph.inputs]
        initializers = [self._define(value, env) for value in graph.initializers.values()]
        for value, original in zip(initializers, graph.initializers.values(), strict=True):
            if original.const_value is not None:
                bind_tensors({value: original.const_value})
            value.metadata_props.update(original.metadata_props)
            value.meta.update(original.meta)
        nodes = self._nodes(graph, env, scope)
        outputs = [env[value] for value in graph.outputs]
        return ir.Graph(inputs, outputs, nodes=nodes, initializers=initializers, name=graph.name)

    def _name(self, body: str | None) -> str:
        """The next name of the flat graph, given the name in the body."""
        self.next_name += 1
        return full_name(self.names[self.next_name - 1], body or "")

    def _define(self, value: ir.Value, env: dict[ir.Value, ir.Value]) -> ir.Value:
        env[value] = value_like(value, self._name(value.name))
        own = str(self.next_name - 1)
        if own in self.shapes:
            shape = self.shapes[own]
            env[value].shape = None if shape is None else ir.Shape(shape)
        return env[value]

    def _properties(self, properties: Mapping[str, str], scope: _Scope) -> dict[str, str]:
        calls = [scope.absolute(address) for address in read_addresses(properties)]
        tags = [scope.absolute_tag(tag) for tag in read_source_tags(properties)]
        joined = {**properties, keys.NAMESPACE: self.inliner.tags[calls[0]].removeprefix("/")}
        joined[keys.LAYER_ANNOTATION] = calls[0].annotation
        return joined | tag_properties([call.address for call in calls], tags, Evidence(properties[keys.EVIDENCE]))

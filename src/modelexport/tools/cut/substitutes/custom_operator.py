"""Replaces a module by one operator, with the module as its body for runtimes without a kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.errors import UsageError
from modelexport.graph.bound_tensors import detach_tensors
from modelexport.graph.copies import copy_of, value_like
from modelexport.graph.nodes import nested_graphs, required_inputs, values_taken
from modelexport.graph.parameter_plans import parameter_plan, record_plan
from modelexport.graph.properties import put_texts
from modelexport.tools.cut.edited_calls import EditedCalls
from modelexport.tools.cut.substitutes.substitute import Parts, Site


@dataclass
class CustomOperator:
    """One node of another operator, with the inputs of the call and then its weights."""

    domain: str
    op_type: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    keep_body: bool = False
    """With a function of the same name whose body is the old module, for runtimes without a kernel."""
    inputs: Sequence[str] = ()
    """Names of the node's inputs, instead of the default: arguments, values, ``state_dict`` keys."""

    @property
    def name(self) -> str:
        return f"{self.domain}:{self.op_type}" if self.domain else self.op_type

    def build(self, site: Site, edited: EditedCalls, used: Iterable[ModuleCall]) -> Parts:
        interface, functions = site.interface, list[ir.Function]()
        if not self.keep_body:
            inputs = self._chosen(site) if self.inputs else [*interface.inputs, *site.weights]
            edited.remove_inside(site.call, used)
        elif self.inputs:
            raise UsageError(
                "an operator with the old module as its body has the inputs of the module: leave out --input"
            )
        else:
            weights, functions = self._body(site)
            inputs = [*interface.inputs, *weights]
        attributes = [_attribute(name, value) for name, value in self.attributes.items()]
        node = ir.Node(self.domain, self.op_type, inputs, attributes, num_outputs=len(interface.outputs))
        return Parts([node], list(node.outputs), functions=functions, opsets={self.domain: 1})

    def _chosen(self, site: Site) -> list[ir.Value]:
        offered = site.interface.offered()
        for value in site.weights:
            plan = parameter_plan(value)
            offered |= {value.name or "": value} | dict.fromkeys(plan.keys if plan is not None else (), value)
        if unknown := [name for name in self.inputs if name not in offered]:
            raise UsageError(f"'{site.call}' has no value '{unknown[0]}': it has {', '.join(offered)}")
        return [offered[name] for name in self.inputs]

    def _body(self, site: Site) -> tuple[list[ir.Value], list[ir.Function]]:
        """The weights that are inputs of the function, and the function."""
        assert site.cut is not None
        graph = site.cut.model.graph
        by_name = {value.name: value for value in site.weights}
        inside = {name: value for name, value in graph.initializers.items() if not is_weight(value)}
        outside = [value for name, value in graph.initializers.items() if name not in inside]
        for value in inside.values():
            assert value.const_value is not None
            tensor = ir.Tensor(value.const_value.numpy().copy(), dtype=value.const_value.dtype, name=value.name)
            constant, output = [ir.AttrTensor("value", tensor)], value_like(value)
            node = ir.Node("", "Constant", [], constant, outputs=[output], name=value.name)
            node.meta.update(next(iter(value.uses())).node.meta)
            ir.convenience.replace_all_uses_with(value, output)
        nodes = _depth_first(graph.outputs)
        used = {value: index for index, value in enumerate(v for node in nodes for v in values_taken(node))}
        outside.sort(key=lambda value: used.get(value, len(used)))
        graph.remove(list(graph))
        inputs, outputs = [*required_inputs(site.cut.model), *outside], list(graph.outputs)
        graph.inputs.clear()
        graph.outputs.clear()
        graph.initializers.clear()
        detach_tensors(outside)
        for value in outside:
            record_plan(value, None)
            put_texts(value, {}, only=True)
        body = ir.Graph(inputs, outputs, nodes=nodes, opset_imports=dict(graph.opset_imports), name=self.op_type)
        declared = [ir.Attr(name, _attribute(name, value).type, None) for name, value in self.attributes.items()]
        function = ir.Function(self.domain, self.op_type, graph=body, attributes=declared)
        weights = [by_name[value.name] for value in outside]
        return weights, [function]


def _attribute(name: str, value: Any) -> ir.Attr:
    try:
        return ir.convenience.convert_attribute(name, value)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"'{value}' cannot be the value of an attribute ({error}): give a number, a text, or a list"
        ) from error


def is_weight(value: ir.Value) -> bool:
    """Whether a weight of a module becomes an input of a function: parameters do, small constants do not."""
    tensor = value.const_value
    return parameter_plan(value) is not None or tensor is None or tensor.nbytes > 1024


def _depth_first(outputs: Iterable[ir.Value]) -> list[ir.Node]:
    """The nodes that values depend on, in an order that follows only from their connections."""
    ordered: dict[ir.Node, None] = {}
    pending = [producer for value in reversed(list(outputs)) if (producer := value.producer()) is not None]
    while pending:
        node = pending[-1]
        before = [p for v in values_taken(node) if (p := v.producer()) is not None and p not in ordered]
        if before and node not in ordered:
            pending.extend(reversed(before))
            continue
        ordered[pending.pop()] = None
    return list(ordered)


def canonical(function: ir.Function) -> bytes:
    """The computation of a function, without the names of its values and nodes and what is known about them."""
    copied = copy_of(function)
    for domain in copied.opset_imports.keys() - {node.domain for node in copied.all_nodes()}:
        del copied.opset_imports[domain]
    values = list(copied.inputs)
    for node in copied.all_nodes():
        node.name = node.doc_string = None
        put_texts(node, {}, only=True)
        for name, attribute in list(node.attributes.items()):
            if attribute.type is ir.AttributeType.TENSOR and not attribute.is_ref():
                tensor = attribute.as_tensor()
                node.attributes[name] = ir.AttrTensor(name, ir.Tensor(tensor.numpy(), dtype=tensor.dtype))
        for graph in nested_graphs(node):
            graph.name = ""
            values.extend(graph.inputs)
        values.extend(node.outputs)
    for number, value in enumerate(values):
        value.name = value.name and str(number)
        value.type = value.shape = None
        put_texts(value, {}, only=True)
    return ir.serde.serialize_function(copied).SerializeToString(deterministic=True)

"""A region as a model that a library quantizes, and the result put back in its place.

A library sees only the nodes that it is to change: what is kept cannot be changed, whatever the library does elsewhere
in a graph. The inputs and outputs of a region keep their types, so that casts and scales are inside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from modelexport.core.owners import Owner, derived_owner
from modelexport.errors import UsageError
from modelexport.files.onnx_models import inside_file
from modelexport.files.protobuf_writing import to_proto
from modelexport.graph.bound_tensors import bind_tensors
from modelexport.graph.copies import copy_of
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.unique_names import names_in
from modelexport.regions.region import Region, drop_unused, put, weights_of
from modelexport.tools.quantize.weights_behind import MOVES_WEIGHTS, same_tensors, weight_behind
from modelexport.weights.recorded_transforms import run_operator, since_version, tensor_attributes


def cut_for_quantizer(model: ir.Model, region: Region) -> onnx.ModelProto:
    """A region of the main graph, whose nodes have no nested graphs, as a model with its weights in it.

    Its inputs are the values that the nodes take from others, constants among them, and every value keeps its name. A
    weight that the graph transposes or cuts is in it as that: quantizers look for initializers.
    """
    taken = [*region.inputs, *weights_of(region.nodes)]
    view = ir.GraphView(taken, region.outputs, nodes=tuple(region.nodes), opset_imports=model.opset_imports)
    graph = copy_of(view)
    for value, copied in zip(taken, list(graph.inputs), strict=True):
        if weight_behind(value) is not None:
            graph.inputs.remove(copied)
            bind_tensors({copied: _tensor(value, model.opset_imports)})
            graph.register_initializer(copied)
    return to_proto(ir.Model(graph, ir_version=model.ir_version), {})


def _tensor(value: ir.Value, opsets: Mapping[str, int]) -> ir.TensorProtocol:
    """The tensor of a weight, with its elements where the graph puts them."""
    if value.producer() is None:
        assert value.const_value is not None
        return inside_file(value.const_value, at_once=True)
    return ir.tensor(np.ascontiguousarray(_elements(value, opsets)), name=value.name)


def _elements(value: ir.Value, opsets: Mapping[str, int]) -> np.ndarray:
    """The array of a weight or of what the graph computes from weights."""
    node = value.producer()
    if node is None or node.op_type == "Constant":
        tensor = ir.convenience.get_const_tensor(value)
        assert tensor is not None
        return tensor.numpy()
    version = since_version(node.op_identifier(), opsets)
    assert version is not None
    inputs = [None if source is None else _elements(source, opsets) for source in node.inputs]
    attributes = tensor_attributes(node.attributes) | {"n_outputs": len(node.outputs)}
    results = run_operator("", node.op_type, version, inputs, attributes)
    return np.asarray(results[node.outputs.index(value)])


class QuantizedRegions:
    """A model whose regions are replaced by quantized ones, one after the other, in place."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        values = (value for node in model.graph for value in node.outputs if value.name)
        self._there: dict[str | None, ir.Value] = {value.name: value for value in values}
        self._names = names_in(model)
        self._new: set[ir.Node] = set()

    def put(self, region: Region, quantized: ir.Model) -> None:
        """Put what a library made of a region in its place.

        Each node gets the owners of the nodes that it leads to: what quantizes an activation belongs to the call that
        is quantized. A node or an initializer that another region has brought already (two regions quantize the same
        activation) is not brought twice.
        """
        import_operators(self._model, quantized)
        for value in (value for node in region.nodes for value in node.outputs):
            self._there.pop(value.name, None)
            self._names.discard(value.name)
        graph, there, owners = quantized.graph, self._model.graph.initializers, _owners(quantized, region)
        taken = {value.name: value for value in (*region.inputs, *weights_of(region.nodes))}
        weights, results = list(graph.initializers.values()), {value.name: value for value in graph.outputs}
        for value in graph.inputs:
            ir.convenience.replace_all_uses_with(value, taken[value.name])
        held = [(value, there.get(value.name or "")) for value in weights]
        equal = {value: it for value, it in held if it and same_tensors(value.const_value, it.const_value)}
        ir.convenience.replace_all_uses_with([*equal], [*equal.values()])
        nodes = list(graph)
        graph.outputs.clear()
        graph.initializers.clear()
        graph.remove(nodes)
        new = self._new_nodes(nodes, results, owners)
        self._names.difference_update(node.name for node in region.nodes)
        leaving = [results[value.name] for value in region.outputs]
        put(self._model, list(new), leaving, region, new, names=self._names)
        for value in taken.values():
            if weight_behind(value) is not None:
                self._drop(value)
        for value in (value for value in weights if value not in equal):
            if value.name in {*there, *self._there}:  # a kept node uses what has the name
                value.name = f"{value.name}.{str(value.dtype).lower()}"
            self._model.graph.register_initializer(value)

    def _new_nodes(
        self, nodes: Sequence[ir.Node], results: dict[str | None, ir.Value], owners: Mapping[ir.Node, Owner | None]
    ) -> dict[ir.Node, Owner | None]:
        """The nodes that the graph does not have yet, to their owners; the results of others become those it has."""
        new: dict[ir.Node, Owner | None] = {}
        for node in nodes:
            same = self._there.get(node.outputs[0].name)
            twin = same.producer() if same is not None else None
            if twin is not None and _is_same(twin, node):
                if twin in self._new:
                    set_owner(twin, derived_owner([owner_of(twin), owners[node]]))
                for value, other in zip(node.outputs, twin.outputs, strict=True):
                    results.update({name: other for name, result in results.items() if result is value})
                    ir.convenience.replace_all_uses_with(value, other)
                continue
            for value in (each for each in node.outputs if each.name):
                while value.name in self._there:
                    value.name = f"{value.name}_again"
                self._there[value.name] = value
            node.name = node.name or "quantized"
            new[node] = owners[node]
        self._new.update(new)
        return new

    def _drop(self, value: ir.Value) -> None:
        """Remove a weight that nothing uses any more, and what moved its elements."""
        producer = value.producer()
        made = [value] if producer is None else producer.outputs
        if any(each.uses() or each.is_graph_input() or each.is_graph_output() for each in made):
            return
        if producer is None:
            drop_unused([value])
        elif producer.op_type in MOVES_WEIGHTS | {"Constant"}:
            sources = [source for source in producer.inputs if source is not None]
            for output in made:
                self._there.pop(output.name, None)
            self._model.graph.remove(producer, safe=True)
            for source in sources:
                self._drop(source)


def import_operators(model: ir.Model, quantized: ir.Model) -> None:
    """Add the sets of operators that a quantized region uses to those of a model."""
    used = {node.domain: 1 for node in quantized.graph if node.domain}  # a library may forget to import them
    for domain, version in (used | quantized.opset_imports).items():
        if (has := model.opset_imports.setdefault(domain, version)) != version:
            raise UsageError(
                f"the library needs version {version} of the operators of '{domain or 'ai.onnx'}', and the file has "
                f"{has}: export it with --opset {version}"
            )


def _owners(quantized: ir.Model, region: Region) -> dict[ir.Node, Owner | None]:
    """The owner of each quantized node: that of the node with its result before, or those of the nodes it leads to."""
    before = {value.name: node for node in region.nodes for value in node.outputs if value.name}
    owners: dict[ir.Node, Owner | None] = {}
    for node in reversed(quantized.graph):
        source = next((before[value.name] for value in node.outputs if value.name in before), None)
        users = (user for value in node.outputs for user in value.consumers())
        owners[node] = derived_owner([owners[user] for user in users] if source is None else [owner_of(source)])
        if source is not None and node.op_identifier() == source.op_identifier():
            owners[node] = owner_of(source)
    for node in quantized.graph:  # what leads to nothing: the scale of a result
        if owners[node] is None:
            makers = [value.producer() for value in node.inputs if value is not None]
            owners[node] = derived_owner([owners[maker] for maker in makers if maker is not None])
    return owners


def _is_same(first: ir.Node, second: ir.Node) -> bool:
    """Whether two nodes compute the same from the same values."""
    return (
        first.op_identifier() == second.op_identifier()
        and first.inputs == second.inputs
        and len(first.outputs) == len(second.outputs)
        and first.attributes == second.attributes
    )

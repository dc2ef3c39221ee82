"""``onnx_ir`` models as serialized ones.

The same as :func:`onnx_ir.serde.serialize_model`, in less than half of the time: each type, and each set of properties
of a node, is encoded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from modelexport.graph.nodes import nested_graphs


def to_proto(model: ir.Model, tensors: Mapping[ir.Value, ir.TensorProtocol]) -> onnx.ModelProto:
    """Serialize a model with other tensors for some initializers; their properties are written to their tensors.

    No ``value_info`` is written for initializers: a tensor contains its type and shape, and ONNX Runtime's quantizers
    fail on initializers that have both.
    """
    proto = ir.serde.serialize_model(without_nodes(model))
    _Writer(model, proto.graph).write(tensors)
    _settle_nested(model.graph, proto.graph, tensors)
    return proto


def without_nodes(model: ir.Model, ends: Callable[[Sequence[ir.Value]], Sequence[ir.Value]] = tuple) -> ir.Model:
    """The same model without nodes and initializers.

    Args:
        ends: Makes what is written as the inputs, and as the outputs, of the graph.
    """
    graph = model.graph
    view = ir.GraphView(
        ends(graph.inputs),
        ends(graph.outputs),
        nodes=(),
        doc_string=graph.doc_string,
        opset_imports=dict(graph.opset_imports),
        name=graph.name,
        metadata_props=dict(graph.metadata_props),
    )
    return ir.Model(
        view,  # type: ignore[arg-type]  # GraphView says that a model of a view can be serialized
        ir_version=model.ir_version,
        producer_name=model.producer_name,
        producer_version=model.producer_version,
        domain=model.domain,
        model_version=model.model_version,
        doc_string=model.doc_string,
        functions=tuple(model.functions.values()),
        metadata_props=dict(model.metadata_props),
        device_configurations=model.device_configurations,
    )


class _Writer:
    """Writes the initializers and nodes of a graph into a serialized one that has neither."""

    def __init__(self, model: ir.Model, proto: onnx.GraphProto) -> None:
        self._model, self._graph, self._proto = model, model.graph, proto
        self._types: dict[tuple[ir.DataType, int], bytes] = {}
        """The element type of a value and the ``id`` of its shape to the serialized type."""
        self._properties: dict[tuple[tuple[str, str], ...], bytes] = {}
        """The properties of nodes to a serialized node that has nothing else."""

    def write(self, tensors: Mapping[ir.Value, ir.TensorProtocol]) -> None:
        graph = self._graph
        written = self._write_initializers(tensors)
        inside: list[ir.Value] = []
        for node in graph:
            self._write_node(node)
            for value in node.outputs:
                if not value.is_graph_output():
                    inside.append(value)
                    if value.name not in written:
                        self._write_value(value)
        for info in (*self._proto.input, *self._proto.output):
            if info.name in written:
                del info.metadata_props[:]
        given = [value for value in graph.inputs if value.name not in graph.initializers]
        self._write_annotations([*given, *graph.initializers.values(), *inside, *graph.outputs])

    def _write_initializers(self, tensors: Mapping[ir.Value, ir.TensorProtocol]) -> set[str]:
        """Write the initializers; returns the names of those with a tensor."""
        written: set[str] = set()
        inputs = {value.name for value in self._graph.inputs}
        for value in self._graph.initializers.values():
            tensor, name = tensors.get(value, value.const_value), value.name or ""
            if tensor is not None:
                tensor.name = name
                write_tensor(self._proto.initializer.add(), tensor, value)
                written.add(name)
            elif name not in inputs:
                self._write_value(value)
        return written

    def _write_node(self, node: ir.Node) -> None:
        proto = self._proto.node.add()
        if node.device_configurations:
            ir.serde.serialize_node_into(proto, node, model_ir_version=self._model.ir_version)
            return
        if properties := node.metadata_props:
            key = tuple(sorted(properties.items()))
            if key not in self._properties:
                entries = [onnx.StringStringEntryProto(key=name, value=text) for name, text in key]
                self._properties[key] = onnx.NodeProto(metadata_props=entries).SerializeToString()
            proto.MergeFromString(self._properties[key])
        proto.op_type = node.op_type
        if node.name:
            proto.name = node.name
        if node.domain:
            proto.domain = node.domain
        if node.overload:
            proto.overload = node.overload
        if node.doc_string:
            proto.doc_string = node.doc_string
        proto.input.extend(["" if value is None else value.name for value in node.inputs])
        outputs = [value.name for value in node.outputs]
        while outputs and not outputs[-1]:
            outputs.pop()
        proto.output.extend(outputs)
        for attribute in node.attributes.data.values() if node.attributes.data else ():
            if attribute.is_ref():
                ir.serde.serialize_reference_attribute_into(proto.attribute.add(), attribute)
            else:
                ir.serde.serialize_attribute_into(proto.attribute.add(), attribute)

    def _write_value(self, value: ir.Value) -> None:
        kind, shape, name = value.type, value.shape, value.name
        if not name or (kind is None and shape is None and not value.metadata_props and not value.doc_string):
            return
        info = self._proto.value_info.add()
        if type(kind) is not ir.TensorType or kind.denotation or value.metadata_props or value.doc_string:
            ir.serde.serialize_value_into(info, value)
            return
        key = kind.dtype, id(shape)
        if key not in self._types:
            only = ir.Value(type=kind, shape=shape)
            self._types[key] = ir.serde.serialize_value(only, name="x").type.SerializeToString()
        info.name = name
        info.type.MergeFromString(self._types[key])

    def _write_annotations(self, values: Iterable[ir.Value]) -> None:
        """Write what tools noted about the quantization of values, in the order of onnx_ir."""
        noted = [value for value in values if value.meta]
        del self._proto.quantization_annotation[:]
        if noted:
            view: Any = ir.GraphView(noted, (), nodes=())  # Any: its annotations do not fit onnx_ir's own protocol
            self._proto.quantization_annotation.extend(ir.serde.serialize_graph(view).quantization_annotation)


def write_tensor(proto: onnx.TensorProto, tensor: ir.TensorProtocol, value: ir.Value) -> None:
    """Write a tensor with the properties of its initializer."""
    ir.serde.serialize_tensor_into(proto, tensor)
    if proto.metadata_props or value.metadata_props:
        properties = {entry.key: entry.value for entry in proto.metadata_props} | dict(value.metadata_props)
        del proto.metadata_props[:]
        for key, text in sorted(properties.items()):
            proto.metadata_props.add(key=key, value=text)


def _settle_initializers(
    graph: ir.Graph, proto: onnx.GraphProto, tensors: Mapping[ir.Value, ir.TensorProtocol]
) -> None:
    """Replace initializers of a nested graph by these tensors, and write the properties of all to their tensors."""
    written = {tensor.name: tensor for tensor in proto.initializer}
    for value in graph.initializers.values():
        if (tensor := written.get(value.name or "")) is not None:
            if value in tensors:
                tensor.CopyFrom(ir.serde.serialize_tensor(tensors[value]))
                tensor.name = value.name or ""
            properties = {entry.key: entry.value for entry in tensor.metadata_props} | dict(value.metadata_props)
            del tensor.metadata_props[:]
            for key, text in sorted(properties.items()):
                tensor.metadata_props.add(key=key, value=text)
    kept = [info for info in proto.value_info if info.name not in written]
    if len(kept) < len(proto.value_info):
        del proto.value_info[:]
        proto.value_info.extend(kept)
    for info in (*proto.input, *proto.output):
        if info.name in written:
            del info.metadata_props[:]


def _settle_nested(graph: ir.Graph, proto: onnx.GraphProto, tensors: Mapping[ir.Value, ir.TensorProtocol]) -> None:
    for node, node_proto in zip(graph, proto.node, strict=True):
        if not (nested := nested_graphs(node)):
            continue
        protos = [
            one
            for attribute in node_proto.attribute
            for one in ([attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs)
        ]
        for graph_inside, inside in zip(nested, protos, strict=True):
            _settle_initializers(graph_inside, inside, tensors)
            _settle_nested(graph_inside, inside, tensors)

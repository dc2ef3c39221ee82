"""``onnx_ir`` models as onnx's messages."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnx_ir as ir

from modelexport.files.serialized import graphs_in
from modelexport.graph.initializers import bind_tensors, detach_tensors
from modelexport.graph.nodes import nested_graphs

Tensors = Mapping[ir.Value, ir.TensorProtocol]


def to_proto(model: ir.Model, tensors: Tensors) -> onnx.ModelProto:
    """Serialize a model with other tensors for some initializers; their properties are written to their tensors.

    No ``value_info`` is written for initializers: a tensor contains its type and shape, and ONNX Runtime's quantizers
    fail on initializers that have both.
    """
    before = detach_tensors(tensors)
    bind_tensors(tensors)
    try:
        proto: onnx.ModelProto = ir.serde.serialize_model(model)
    finally:
        detach_tensors(tensors)
        bind_tensors(before)
    _complete(model.graph, proto.graph)
    return proto


def _complete(graph: ir.Graph, proto: onnx.GraphProto) -> None:
    """Give the initializers of a graph, and of those nested in it, their properties, and nothing in ``value_info``."""
    for tensor in proto.initializer:
        properties = {entry.key: entry.value for entry in tensor.metadata_props}
        properties |= graph.initializers[tensor.name].metadata_props
        del tensor.metadata_props[:]
        for key, text in sorted(properties.items()):
            tensor.metadata_props.add(key=key, value=text)
    written = {tensor.name for tensor in proto.initializer}
    kept = [info for info in proto.value_info if info.name not in written]
    del proto.value_info[:]
    proto.value_info.extend(kept)
    for info in (*proto.input, *proto.output):
        if info.name in written:
            del info.metadata_props[:]
    for node, node_proto in zip(graph, proto.node, strict=True):
        if nested := nested_graphs(node):
            protos = [inside for attribute in node_proto.attribute for inside in graphs_in(attribute)]
            for inner, inside in zip(nested, protos, strict=True):
                _complete(inner, inside)

"""Plain models (:mod:`modelexport.graph.plain`) as serialized ones: what was changed is written into what was read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
import onnx_ir as ir

from modelexport.files.deserializing import SerializedTensor
from modelexport.files.serializing import without_nodes, write_tensor
from modelexport.graph.plain import PlainModel

_KEPT = ("node", "initializer", "value_info")
"""The fields of a graph that are changed in place."""


def plain_proto(model: PlainModel, tensors: Mapping[ir.Value, ir.TensorProtocol]) -> onnx.ModelProto:
    """Serialize a plain model; the same bytes as :func:`modelexport.files.serializing.to_proto` gives.

    Args:
        tensors: Other tensors for some initializers.
    """
    proto = model.serialized
    graph = proto.graph
    header = ir.serde.serialize_model(without_nodes(model, _copies))
    for field, _ in proto.ListFields():
        if field.name != "graph":
            proto.ClearField(field.name)
    for field, _ in graph.ListFields():
        if field.name not in _KEPT:
            graph.ClearField(field.name)
    proto.MergeFrom(header)
    _write_initializers(model, graph, tensors)
    _write_nodes(model, graph)
    _order_types(model, graph)
    return proto


def _copies(values: Iterable[ir.Value]) -> list[ir.Value]:
    return [
        ir.Value(
            name=v.name, type=v.type, shape=v.shape, doc_string=v.doc_string, metadata_props=dict(v.metadata_props)
        )
        for v in values
    ]


def _write_properties(proto: onnx.TensorProto | onnx.NodeProto, properties: Mapping[str, str]) -> None:
    proto.ClearField("metadata_props")
    for key, text in sorted(properties.items()):
        proto.metadata_props.add(key=key, value=text)


def _write_initializers(
    model: PlainModel, graph: onnx.GraphProto, tensors: Mapping[ir.Value, ir.TensorProtocol]
) -> None:
    values = model.graph.initializers.values()
    given = [tensors.get(value, value.const_value) for value in values]
    if all(type(tensor) is SerializedTensor for tensor in given):  # they are what was read
        for value, proto in zip(values, graph.initializer, strict=True):
            _write_properties(proto, value.metadata_props)
        return
    made = onnx.GraphProto()  # the data of a tensor that is described here may be read from the old one later
    for value, tensor in zip(values, given, strict=True):
        assert tensor is not None
        tensor.name = value.name
        write_tensor(made.initializer.add(), tensor, value)
    graph.ClearField("initializer")
    graph.initializer.extend(made.initializer)


def _write_nodes(model: PlainModel, graph: onnx.GraphProto) -> None:
    encoded: dict[int, bytes] = {}
    """By the identity of properties: the nodes of one owner share them."""
    for node, proto in zip(model.graph, graph.node, strict=True):
        proto.ClearField("metadata_props")
        if properties := node.metadata_props:
            if id(properties) not in encoded:
                entries = [onnx.StringStringEntryProto(key=key, value=text) for key, text in sorted(properties.items())]
                encoded[id(properties)] = onnx.NodeProto(metadata_props=entries).SerializeToString()
            proto.MergeFromString(encoded[id(properties)])
        if proto.name != node.name:
            proto.name = node.name or ""
        # onnx_ir does not write empty texts.
        if not node.name:
            proto.ClearField("name")
        if not node.domain:
            proto.ClearField("domain")
        if not node.overload:
            proto.ClearField("overload")
        if not node.doc_string:
            proto.ClearField("doc_string")
        if not node.outputs[-1].name:
            while proto.output and not proto.output[-1]:
                del proto.output[-1]


def _order_types(model: PlainModel, graph: onnx.GraphProto) -> None:
    """Put the types of values into the order of the nodes; those of initializers and outputs are written elsewhere."""
    infos = {info.name: info for info in graph.value_info}
    made = [
        value.name
        for node in model.graph
        for value in node.outputs
        if value.name in infos and not value.is_graph_output() and (value.type is not None or value.shape is not None)
    ]
    if made != [info.name for info in graph.value_info]:
        ordered = onnx.GraphProto(value_info=[infos[name] for name in made])
        graph.ClearField("value_info")
        graph.value_info.extend(ordered.value_info)

"""Types of values that ``onnx_ir`` cannot hold (maps, and sequences of them) as a property, until they are written."""

from __future__ import annotations

import base64

import onnx
import onnx_ir as ir

from modelexport.files.protobuf_reading import serialized_graphs
from modelexport.format.keys import VALUE_TYPE


def model_of(proto: onnx.ModelProto) -> ir.Model:
    """The model that a message is, which is not changed.

    Raises:
        SerdeError: It is damaged.
    """
    hide_map_types(proto)
    try:
        return ir.serde.deserialize_model(proto)
    finally:
        restore_map_types(proto)


def hide_map_types(model: onnx.ModelProto) -> None:
    """Move the types with maps, which classifiers of ``ai.onnx.ml`` return, into properties of their values."""
    for graph in serialized_graphs(model):
        for value in (*graph.input, *graph.output, *graph.value_info):
            if _has_map(value.type):
                value.metadata_props.add(
                    key=VALUE_TYPE, value=base64.b64encode(value.type.SerializeToString()).decode()
                )
                value.ClearField("type")


def restore_map_types(model: onnx.ModelProto) -> None:
    """Undo :func:`hide_map_types`."""
    for graph in serialized_graphs(model):
        for value in (*graph.input, *graph.output, *graph.value_info):
            for number, entry in enumerate(value.metadata_props):
                if entry.key == VALUE_TYPE:
                    value.type.ParseFromString(base64.b64decode(entry.value))
                    del value.metadata_props[number]
                    break


def _has_map(kind: onnx.TypeProto) -> bool:
    if kind.HasField("sequence_type"):
        return _has_map(kind.sequence_type.elem_type)
    if kind.HasField("optional_type"):
        return _has_map(kind.optional_type.elem_type)
    return bool(kind.HasField("map_type"))

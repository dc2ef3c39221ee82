"""Checks of the tensors of a serialized model: whether each has the data that its type and shape require."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import onnx

from modelexport.errors import FileFormatError


def with_nested(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes, each followed by the nodes of its nested graphs."""
    for node in nodes:
        yield node
        if attributes := node.attribute:
            for attribute in attributes:
                for graph in graphs_in(attribute):
                    yield from with_nested(graph.node)


def serialized_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node, those of nested graphs and functions included."""
    for graph in (model.graph, *model.functions):
        yield from with_nested(graph.node)


def serialized_attributes(model: onnx.ModelProto) -> Iterator[onnx.AttributeProto]:
    """Every attribute, those of nodes in nested graphs and functions included."""
    for graph in (model.graph, *model.functions):
        yield from _attributes(graph.node)


def _attributes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.AttributeProto]:
    for attributes in [found for node in nodes if (found := node.attribute)]:  # most nodes have none
        for attribute in attributes:
            yield attribute
            for graph in graphs_in(attribute):
                yield from _attributes(graph.node)


def graphs_in(attribute: onnx.AttributeProto) -> Sequence[onnx.GraphProto]:
    """The graphs that an attribute holds."""
    return (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs


def serialized_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Initializers and the tensors of attributes, those of nested graphs and functions included."""
    yield from model.graph.initializer
    for attribute in serialized_attributes(model):
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        for graph in graphs_in(attribute):
            yield from graph.initializer


def check_kept(model: onnx.ModelProto) -> None:
    """Refuse what onnx_ir drops without an error: a file that is written from the model would lack it.

    Commands that only read refuse it, too: they would describe a model without these weights.

    Raises:
        FileFormatError: Says what the model has.
    """
    if model.training_info:
        raise FileFormatError("the model has training_info, which is not read: remove it from the file")
    nested = (graph for attribute in serialized_attributes(model) for graph in graphs_in(attribute))
    for graph in (model.graph, *nested):
        if graph.sparse_initializer:
            name = graph.sparse_initializer[0].values.name
            raise FileFormatError(f"the initializer {name!r} is sparse, which is not read: make it dense")


def check_nodes(model: onnx.ModelProto) -> None:
    """Refuse nodes without outputs, and attributes without a value of their type.

    Raises:
        FileFormatError: Names the first such node or attribute.
    """
    for node in serialized_nodes(model):
        if not node.output:
            raise FileFormatError(f"the node {node.name!r} ({node.op_type}) has no outputs")
        for attribute in node.attribute or ():
            field = _VALUES.get(attribute.type)
            if field is not None and not attribute.ref_attr_name and not attribute.HasField(field):
                raise FileFormatError(f"the attribute {attribute.name!r} of the node {node.name!r} has no value")


_VALUES = {onnx.AttributeProto.TENSOR: "t", onnx.AttributeProto.GRAPH: "g", onnx.AttributeProto.TYPE_PROTO: "tp"}


def check_data(model: onnx.ModelProto) -> None:
    """Refuse tensors whose data is shorter or longer than their shape requires: reading them later would fail.

    Raises:
        FileFormatError: Names the first such tensor.
    """
    for tensor in serialized_tensors(model):
        _check_tensor(tensor)


def _check_tensor(tensor: onnx.TensorProto) -> None:
    data_type, raw = tensor.data_type, tensor.HasField("raw_data")
    if data_type not in _BITS or data_type == onnx.TensorProto.UNDEFINED:
        raise FileFormatError(f"the tensor {tensor.name!r} has the unknown type {data_type}")
    if tensor.HasField("segment"):
        raise FileFormatError(f"the tensor {tensor.name!r} is a segment of another one, which onnx does not read")
    dims = tensor.dims
    if dims and min(dims) < 0:
        raise FileFormatError(f"the tensor {tensor.name!r} has a negative size")
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        if data_type == onnx.TensorProto.STRING:
            raise FileFormatError(f"the tensor {tensor.name!r} has texts in another file, which ONNX does not allow")
        return
    if data_type == onnx.TensorProto.STRING and raw:
        raise FileFormatError(f"the tensor {tensor.name!r} has texts as bytes, which ONNX does not allow")
    size = prod(dims)
    if raw:
        bits = _BITS[data_type]
        if bits is not None and len(tensor.raw_data) != (size * bits + 7) // 8:
            raise FileFormatError(
                f"the tensor {tensor.name!r} has {len(tensor.raw_data):,} bytes for {size:,} elements"
            )
        return
    own = _OWN_FIELDS.get(data_type)
    if own is not None and len(getattr(tensor, own)) == size:
        return
    held = max(len(getattr(tensor, field)) for field in _FIELDS)
    if size > held * _MOST_IN_ONE:
        raise FileFormatError(f"the tensor {tensor.name!r} has data for {held:,} of {size:,} elements")
    try:
        onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError, LookupError, OverflowError) as error:
        raise FileFormatError(f"the tensor {tensor.name!r} has data of another type or size: {error}") from error


_MOST_IN_ONE = 4
"""Two-bit elements in one number of ``int32_data``."""
_HALVES_AND_BYTES = (
    onnx.TensorProto.BOOL,
    onnx.TensorProto.INT8,
    onnx.TensorProto.UINT8,
    onnx.TensorProto.INT16,
    onnx.TensorProto.UINT16,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
)
_OWN_FIELDS: dict[int, str] = {
    onnx.TensorProto.FLOAT: "float_data",
    onnx.TensorProto.DOUBLE: "double_data",
    **dict.fromkeys(_HALVES_AND_BYTES, "int32_data"),
    onnx.TensorProto.INT32: "int32_data",
    onnx.TensorProto.INT64: "int64_data",
    onnx.TensorProto.UINT64: "uint64_data",
}
"""Types to the field that has a number for each of their elements, whatever number."""
_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")


def _bits(data_type: int) -> int | None:
    """The bits of one element; ``None`` if it has no fixed size."""
    name = onnx.TensorProto.DataType.Name(data_type)
    if name in ("UNDEFINED", "STRING"):
        return None
    if name.endswith("INT4") or name == "FLOAT4E2M1":
        return 4
    if name.endswith("INT2"):
        return 2
    if name.startswith("FLOAT6"):
        return 6
    return int(onnx.helper.tensor_dtype_to_np_dtype(data_type).itemsize) * 8


_BITS = {number: _bits(number) for number in onnx.TensorProto.DataType.values()}

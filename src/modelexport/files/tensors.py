"""The tensors of a serialized model: whether each has the data that its type and shape say."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import prod

import onnx

from modelexport.errors import FileFormatError


def all_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Initializers and the tensors of attributes, those of nested graphs and functions included."""
    graphs = [model.graph]
    nodes = [function.node for function in model.functions]
    while graphs or nodes:
        if graphs:
            graph = graphs.pop()
            yield from graph.initializer
            nodes.append(graph.node)
        for node in nodes.pop() if nodes else ():
            for attribute in node.attribute:
                yield attribute.t
                yield from attribute.tensors
                graphs.extend(attribute.graphs)
                if attribute.HasField("g"):
                    graphs.append(attribute.g)


def check_data(model: onnx.ModelProto, elsewhere: Collection[str]) -> None:
    """Refuse tensors whose data is shorter or longer than their shape: whoever reads them later would fail.

    Args:
        elsewhere: Names of initializers whose data was taken out, and has been looked at.

    Raises:
        FileFormatError: There is one. Names it.
    """
    for tensor in all_tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL or not tensor.ByteSize():
            continue
        if not tensor.HasField("raw_data") and tensor.name in elsewhere:
            continue
        size = prod(tensor.dims)
        if any(dim < 0 for dim in tensor.dims):
            raise FileFormatError(f"the tensor {tensor.name!r} has a negative size")
        if tensor.HasField("raw_data"):
            bits = _BITS.get(tensor.data_type)
            if bits is not None and len(tensor.raw_data) != (size * bits + 7) // 8:
                raise FileFormatError(
                    f"the tensor {tensor.name!r} has {len(tensor.raw_data):,} bytes for {size:,} elements"
                )
            continue
        held = max(len(getattr(tensor, field)) for field in _FIELDS)
        if size > held * _MOST_IN_ONE:
            raise FileFormatError(f"the tensor {tensor.name!r} has data for {held:,} of {size:,} elements")
        try:
            onnx.numpy_helper.to_array(tensor)
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            raise FileFormatError(f"the tensor {tensor.name!r} has data of another type or size: {error}") from error


_MOST_IN_ONE = 4
"""Elements in one number of ``int32_data``, where they have two bits."""
_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")


def _bits(data_type: int) -> int | None:
    """Of one element; ``None`` where it has no fixed size."""
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

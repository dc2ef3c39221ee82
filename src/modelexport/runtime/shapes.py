"""The shapes that the values of a model have with given inputs, without a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir

from modelexport.files.protos import to_proto
from modelexport.graph.nodes import initializers
from modelexport.graph.sizes import put_size

Shape = tuple[int | None, ...]
_SMALL = 1024
"""Bytes up to which a constant may be a shape, and is left in the model."""


def shapes_in_run(model: ir.Model, given: Mapping[str, Sequence[int]]) -> dict[str, Shape]:
    """The shapes of the values of the main graph, with ``None`` for unknown sizes; those of unknown rank are left out.

    The shapes in the model suffice if all their symbols are sizes of inputs. Else ONNX infers the others, which takes
    less than a tenth of the time of a session.

    Args:
        given: The shapes of the inputs of the model.
    """
    symbols = {
        size.value: str(number)
        for value in model.graph.inputs
        if value.shape is not None and len(value.shape) == len(given.get(value.name or "", ()))
        for size, number in zip(value.shape, given.get(value.name or "", ()), strict=True)
        if isinstance(size, ir.SymbolicDim) and size.value is not None
    }
    values = [value for node in model.graph for value in node.outputs if value.name]
    shapes = {value.name or "": _known(value.shape, symbols) for value in values if value.shape is not None}
    if len(shapes) < len(values) or any(None in shape for shape in shapes.values()):
        for name, found in _inferred(model, given, symbols).items():
            shapes[name] = _merged(shapes.get(name), found)
    return shapes


def _merged(one: Shape | None, other: Shape) -> Shape:
    """The sizes of the first that are known, and those of the second."""
    if one is None or len(one) != len(other):
        return other
    return tuple(b if a is None else a for a, b in zip(one, other, strict=True))


def _known(shape: ir.Shape, symbols: Mapping[str, str]) -> Shape:
    sizes = [size if isinstance(size, int) else put_size(size.value or "", symbols) for size in shape]
    return tuple(size if isinstance(size, int) else None for size in sizes)


def _inferred(model: ir.Model, given: Mapping[str, Sequence[int]], symbols: Mapping[str, str]) -> dict[str, Shape]:
    """The shapes that ONNX infers; none if it cannot, as in a model with operators that it does not have."""
    large = {
        value: ir.ExternalTensor(
            "weights", 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=value.name or ""
        )
        for value in initializers(model)
        if (tensor := value.const_value) is not None and tensor.nbytes >= _SMALL
    }
    proto = to_proto(model, large)
    for value in proto.graph.input:
        sizes = given.get(value.name, ())
        dims = value.type.tensor_type.shape.dim
        if len(sizes) == len(dims):
            for dim, size in zip(dims, sizes, strict=True):
                dim.dim_value = size
    try:
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except Exception:  # the shapes are an estimate of memory; those that are not known are taken to be large
        return {}
    return {
        value.name: tuple(_number(dim, symbols) for dim in value.type.tensor_type.shape.dim)
        for value in inferred.graph.value_info
        if value.type.tensor_type.HasField("shape")
    }


def _number(dim: onnx.TensorShapeProto.Dimension, symbols: Mapping[str, str]) -> int | None:
    size = int(dim.dim_value) if dim.HasField("dim_value") else put_size(dim.dim_param, symbols)
    return size if isinstance(size, int) else None

"""The shape of every value of a graph, for given sizes of its dynamic axes.

Shapes in the file take precedence. Missing ones are inferred by onnx's shape inference, which also follows sizes that a
graph computes. Those of ONNX Runtime's own operators, and sizes that depend on the data (``NonZero``), stay unknown.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx
import onnx_ir as ir

from modelexport.core.text import suggest
from modelexport.errors import UsageError
from modelexport.files.protobuf_reading import serialized_graphs
from modelexport.format.dtypes import bit_width
from modelexport.graph.bound_tensors import bind_tensors, detach_tensors
from modelexport.graph.copies import copy_of
from modelexport.graph.missing_types import has_long_row
from modelexport.graph.nodes import all_nodes
from modelexport.graph.size_formulas import SIZE_LIMIT, evaluated_size, symbols_in, symbols_of
from modelexport.graph.size_symbols import rename_sizes

_LARGE = 1024
"""The number of elements from which an initializer is not taken for a size."""


@dataclass(frozen=True)
class Shapes:
    """The shapes and element types of a graph's values by name, as far as they are known."""

    sizes: Mapping[str, tuple[int, ...]]
    types: Mapping[str, ir.DataType]
    symbols: tuple[str, ...]
    """Names of dynamic axes of the inputs for which no size was given."""
    computed: tuple[str, ...] = ()
    """Names of sizes that depend on the data."""

    def of(self, value: ir.Value | None) -> tuple[int, ...] | None:
        """The shape of a value; ``None`` if it is not known."""
        return None if value is None else self.sizes.get(value.name or "")

    def completed(self, seen: Mapping[str, tuple[int, ...]]) -> Shapes:
        """The shapes with those of a run, in which every size is known."""
        return replace(self, sizes={**self.sizes, **seen}, computed=()) if seen else self

    def bytes(self, value: ir.Value | None) -> int | None:
        """The size of a value in bytes; ``None`` if its shape or its element type is not known."""
        shape = self.of(value)
        dtype = self.types.get(value.name or "") if value is not None else None
        if shape is None or not (width := bit_width(dtype)):
            return None
        return -(-elements(shape) * width // 8)


def elements(shape: Iterable[int]) -> int:
    """The number of elements of a shape."""
    return math.prod(shape)


def symbols_of_inputs(model: ir.Model) -> list[str]:
    """The names in the sizes of a model's inputs."""
    sizes = [size for value in model.graph.inputs for size in value.shape or () if isinstance(size, ir.SymbolicDim)]
    return symbols_of([size.value for size in sizes if size.value is not None])


def find_shapes(model: ir.Model, sizes: Mapping[str, int] | None = None) -> Shapes:
    """The shapes of all values, with ``sizes`` for the symbols of dynamic axes.

    Args:
        sizes: Symbol to size. Values whose shape depends on another symbol have none.
    """
    known_sizes, symbols = dict(sizes or {}), symbols_of_inputs(model)
    graphs = list(model.graphs())
    values = [value for graph in graphs for value in graph.inputs]
    values += [value for node in all_nodes(model) for value in node.outputs]
    initial = [value for graph in graphs for value in graph.initializers.values()]
    known: dict[str, tuple[int, ...]] = {}
    types = {value.name or "": value.dtype for value in [*values, *initial] if value.dtype is not None and value.name}
    numbers: dict[str, int | None] = {}

    def number(size: int | str) -> int | None:
        if isinstance(size, str) and size not in numbers:
            numbers[size] = evaluated_size(size, known_sizes)
        return numbers[size] if isinstance(size, str) else size

    def keep(name: str, dims: Sequence[int | str]) -> None:
        shape = tuple(size for size in map(number, dims) if size is not None)
        if len(shape) == len(dims) and 0 <= elements(shape) < SIZE_LIMIT:  # figures of larger ones are not numbers
            known.setdefault(name, shape)

    for value in [*values, *initial]:
        shape = value.const_value.shape if value.const_value is not None else value.shape
        sizes_of_value = [size if isinstance(size, int) else size.value for size in shape or ()]
        if shape is not None and None not in sizes_of_value:
            keep(value.name or "", [size for size in sizes_of_value if size is not None])
    if any(value.name and value.name not in known for value in values):
        for name, dtype, dims in _inferred(model, known_sizes):
            keep(name, dims)
            types.setdefault(name, dtype)
    declared = {*symbols, *numbers}
    used = {name for text in numbers for name in symbols_in(text, declared)}
    for name in known_sizes:
        if name not in symbols and name not in used:
            has = f"; it has {', '.join(symbols)}" if symbols else ": all of its sizes are fixed"
            raise UsageError(f"the model has no dynamic axis '{name}'{suggest(name, symbols)}{has}")
    left = {name for text, size in numbers.items() if size is None for name in symbols_in(text, declared)}
    computed = left.difference(symbols, known_sizes)
    return Shapes(known, types, tuple(name for name in symbols if name not in known_sizes), tuple(sorted(computed)))


def _inferred(model: ir.Model, sizes: Mapping[str, int]) -> list[tuple[str, ir.DataType, tuple[int | str, ...]]]:
    """What onnx's shape inference finds: name, element type and shape of values, with the given sizes."""
    inferred = _small(model, sizes)
    with contextlib.suppress(onnx.shape_inference.InferenceError):  # of a file that contradicts itself
        inferred = onnx.shape_inference.infer_shapes(inferred)
        if not has_long_row(shape for _, _, shape in _known_shapes(inferred)):
            inferred = onnx.shape_inference.infer_shapes(inferred, data_prop=True)
    return _known_shapes(inferred)


def _known_shapes(model: onnx.ModelProto) -> list[tuple[str, ir.DataType, tuple[int | str, ...]]]:
    """Name, element type and shape of each value of a model whose sizes are known."""
    shapes: list[tuple[str, ir.DataType, tuple[int | str, ...]]] = []
    for info in (info for graph in serialized_graphs(model) for info in (*graph.value_info, *graph.output)):
        tensor = info.type.tensor_type
        if tensor.HasField("shape"):
            dims = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in tensor.shape.dim]
            if all(dim != "" for dim in dims):
                shapes.append((info.name, ir.DataType(tensor.elem_type), tuple(dims)))
    return shapes


def _small(model: ir.Model, sizes: Mapping[str, int]) -> onnx.ModelProto:
    """The model with its large weights, which no shape depends on, as inputs, and all others in memory.

    Shape inference takes a serialized model, of less than 2 GB.
    """
    copy = copy_of(model)
    rename_sizes(copy, {name: str(size) for name, size in sizes.items()})
    held: dict[ir.Value, ir.TensorProtocol] = {}
    for graph in copy.graphs():
        for value in list(graph.initializers.values()):
            tensor = value.const_value
            if tensor is None:
                continue
            if tensor.dtype == ir.DataType.STRING:
                held[value] = tensor
            elif tensor.size <= _LARGE:
                held[value] = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=value.name)
            elif graph is copy.graph:
                del graph.initializers[value.name or ""]
                detach_tensors([value])
                value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
                if value not in graph.inputs:
                    graph.inputs.append(value)
    bind_tensors(held)
    proto: onnx.ModelProto = ir.to_proto(copy)
    del proto.graph.value_info[:]
    return proto

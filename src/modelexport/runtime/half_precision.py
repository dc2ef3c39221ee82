"""A model in float16, by ONNX Runtime's converter, and right where the converter alone is not."""

from __future__ import annotations

import re

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from modelexport.files.protobuf_reading import serialized_graphs
from modelexport.format.dtypes import LARGEST_FLOAT16

_QUANTIZERS = re.compile("uantizeLinear|QLinear")


def reach(numbers: np.ndarray, *, of_weights: bool = True) -> float:
    """The largest size of finite numbers that float16 has to hold, 0 if there are none.

    The number by which a mask hides is none of them: the lowest one of float16 hides too. It is the lowest number of
    float32 or, in weights, another that is below the range beside one of what is seen.
    """
    finite = numbers[np.isfinite(numbers)]
    sizes = np.abs(finite)
    if not sizes.size or sizes.max() <= LARGEST_FLOAT16:
        return float(sizes.max(initial=0))
    outside = finite[sizes > LARGEST_FLOAT16]
    return float(
        sizes.max(initial=0, where=sizes <= LARGEST_FLOAT16) if _hides(numbers, outside, of_weights) else sizes.max()
    )


def _hides(numbers: np.ndarray, outside: np.ndarray, of_weights: bool) -> bool:
    """Whether numbers beyond the range are those of a mask."""
    lowest = outside.min()
    is_only = lowest < 0 and bool((outside == lowest).all())
    return is_only and bool(lowest == np.finfo(np.float32).min or (of_weights and np.unique(numbers).size <= 2))


def in_half_precision(model: onnx.ModelProto) -> onnx.ModelProto:
    """Convert a model, in place, to float16, with the inputs and outputs as they were.

    Nodes with weights beyond the range of float16 stay in float32, and quantizers, whose scales are float32. The
    converter would leave out constants that are lists of numbers, and convert a value twice that a node in float32
    takes twice.
    """
    from onnxruntime.transformers.float16 import convert_float_to_float16

    kept: list[str] = []
    for graph in serialized_graphs(model):
        _hold_constants(graph)
        large = {tensor.name for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT
                 and reach(numpy_helper.to_array(tensor)) > LARGEST_FLOAT16}  # fmt: skip
        for node in graph.node:
            if large.intersection(node.input) or _QUANTIZERS.search(node.op_type):
                node.name = node.name or f"{node.op_type} of {node.output[0]}"
                kept.append(node.name)
    result: onnx.ModelProto = convert_float_to_float16(model, keep_io_types=True, node_block_list=kept)
    graphs = list(serialized_graphs(result))
    used = {name for graph in graphs for node in graph.node for name in node.input}
    used.update(value.name for graph in graphs for value in graph.output)
    for graph in graphs:
        typed = [value for value in graph.value_info if value.name in used]  # the mean of a normalization stays float
        del graph.value_info[:]
        graph.value_info.extend(typed)
        made: set[str] = set()
        for node in [node for node in graph.node if node.op_type == "Cast"]:
            if node.output[0] in made:
                graph.node.remove(node)
            made.add(node.output[0])
    return result


def _hold_constants(graph: onnx.GraphProto) -> None:
    """Make tensors of the numbers in ``Constant`` nodes, and initializers of those beyond the range."""
    constants = [(node, each) for node in graph.node if node.op_type == "Constant" for each in node.attribute]
    for node, attribute in constants:
        if attribute.name in ("value_float", "value_floats"):
            numbers = np.array(helper.get_attribute_value(attribute), np.float32)
            attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(numbers)))
        if attribute.t.data_type == TensorProto.FLOAT and reach(numpy_helper.to_array(attribute.t)) > LARGEST_FLOAT16:
            graph.initializer.append(attribute.t)
            graph.initializer[-1].name = node.output[0]
            graph.node.remove(node)

"""Products with constant weights as ONNX Runtime's quantizers can take them.

They do not know ``FusedMatMul``, and turn ``Gemm`` into ``MatMul`` by transposing its weight in place, once for each
node: a layer that is called twice would compute with the weight as it was, and a tied embedding with a transposed one.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx

from modelexport.files.protobuf_reading import serialized_graphs


def transpose_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Transpose, in the file, the weights that ``FusedMatMul`` and, if several nodes use them, ``Gemm`` transpose.

    ``FusedMatMul`` becomes ``MatMul``, and its weight is scaled as the node does. The model is changed in place.
    """
    graphs = list(serialized_graphs(model))
    tensors = {tensor.name: (graph, tensor) for graph in graphs for tensor in graph.initializer}
    uses = Counter(name for graph in graphs for node in graph.node for name in node.input)
    changed: dict[str, str] = {}
    for node in [node for graph in graphs for node in graph.node if node.op_type in ("FusedMatMul", "Gemm")]:
        attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        factor, transposed = attributes.pop("alpha", 1.0), attributes.pop("transB", 0)
        if node.op_type == "Gemm" and (factor != 1 or not transposed or uses[node.input[1]] < 2):
            continue
        if attributes.pop("beta", 1.0) != 1 or any(attributes.values()) or node.input[1] not in tensors:
            continue
        graph, weight = tensors[node.input[1]]
        name = f"{weight.name}.{'transposed' if transposed else 'plain'}{'' if factor == 1 else factor}"
        if name not in tensors:
            array = onnx.numpy_helper.to_array(weight)
            array = np.swapaxes(array, -1, -2) if transposed else array
            array = np.ascontiguousarray(array * array.dtype.type(factor))
            graph.initializer.append(onnx.numpy_helper.from_array(array, name))
            tensors[name] = graph, graph.initializer[-1]
        node.input[1], changed[weight.name] = name, name
        if node.op_type == "Gemm":
            node.attribute.remove(next(held for held in node.attribute if held.name == "transB"))
        else:
            node.op_type, node.domain = "MatMul", ""
            del node.attribute[:]
    used = {name for graph in graphs for node in graph.node for name in node.input}
    used |= {value.name for graph in graphs for value in graph.output}
    for name in changed.keys() - used:
        tensors[name][0].initializer.remove(tensors[name][1])
    return model

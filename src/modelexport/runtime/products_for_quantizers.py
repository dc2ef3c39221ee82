"""Products with constant weights as ONNX Runtime's quantizers can take them.

They leave a product alone if a node transposes its weight, as in a file that is linked to its weights. They do not know
``FusedMatMul``, and turn ``Gemm`` into ``MatMul`` by transposing its weight in place, once for each node: a layer that
is called twice would compute with the weight as it was, and a tied embedding with a transposed one.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx

from modelexport.files.protobuf_reading import serialized_graphs

Tensors = dict[str, tuple[onnx.GraphProto, onnx.TensorProto]]
"""Each initializer and the graph that has it, by name."""


def transpose_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Transpose, in the file, the weights of products that nodes transpose.

    These are ``Transpose`` before a ``MatMul`` or ``Gemm``, which is removed; ``FusedMatMul``, which becomes ``MatMul``
    with a weight that is scaled as the node does; and ``Gemm`` if several nodes use its weight. The model is changed in
    place.
    """
    graphs = list(serialized_graphs(model))
    initializers = [(graph, tensor) for graph in graphs for tensor in graph.initializer]
    nodes = [node for graph in graphs for node in graph.node]
    # Branches may use one name for different values, which are left alone.
    makers = Counter([tensor.name for _, tensor in initializers] + [name for node in nodes for name in node.output])
    tensors: Tensors = {tensor.name: (graph, tensor) for graph, tensor in initializers if makers[tensor.name] == 1}
    uses = Counter(name for node in nodes for name in node.input)
    changed: set[str] = set()
    factors = {node.input[1] for node in nodes if node.op_type in ("MatMul", "Gemm") and makers[node.input[1]] == 1}
    for graph in graphs:
        for node in [node for node in graph.node if node.op_type == "Transpose" and node.output[0] in factors]:
            if node.input[0] in tensors:
                array = onnx.numpy_helper.to_array(tensors[node.input[0]][1])
                order = next((attribute.ints for attribute in node.attribute), None)
                _add(graph, tensors, np.transpose(array, order), node.output[0])
                changed.add(node.input[0])
                graph.node.remove(node)
    for node in [node for node in nodes if node.op_type in ("FusedMatMul", "Gemm")]:
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
            _add(graph, tensors, array * array.dtype.type(factor), name)
        changed.add(weight.name)
        node.input[1] = name
        if node.op_type == "Gemm":
            node.attribute.remove(next(held for held in node.attribute if held.name == "transB"))
        else:
            node.op_type, node.domain = "MatMul", ""
            del node.attribute[:]
    used = {name for graph in graphs for node in graph.node for name in node.input}
    used |= {value.name for graph in graphs for value in graph.output}
    for name in changed - used:
        tensors[name][0].initializer.remove(tensors[name][1])
    return model


def _add(graph: onnx.GraphProto, tensors: Tensors, array: np.ndarray, name: str) -> None:
    """Add an initializer to a graph and to its index."""
    graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(array), name))
    tensors[name] = graph, graph.initializer[-1]

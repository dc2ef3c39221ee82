"""Products with constant weights as ONNX Runtime's quantizers can take them.

They leave a product alone if a node transposes its weight, as in a file that is linked to its weights. They do not know
``FusedMatMul``. They leave a ``Gemm`` with factors alone, or lose the factor of its bias (``beta``), and fail if its
bias is one number for all columns. They turn ``Gemm`` into ``MatMul`` by transposing its weight in place, once for each
node: a layer that is called twice would compute with the weight as it was, and a tied embedding with a transposed one.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import onnx

from modelexport.files.protobuf_reading import serialized_graphs

Tensors = dict[str, tuple[onnx.GraphProto, onnx.TensorProto]]
"""Each initializer and the graph that has it, by name."""


def transpose_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Transpose, in the file, the weights of products that nodes transpose, and scale those that nodes scale.

    These are ``Transpose`` before a ``MatMul`` or ``Gemm``, which is removed; ``FusedMatMul``, which becomes
    ``MatMul``; and ``Gemm``: its weight is transposed if several nodes use it. The model is changed in place.
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

    def hold(node: onnx.NodeProto, place: int, factor: float, transposed: bool) -> None:
        """Let a node take an initializer as it uses it."""
        if factor == 1 and not transposed:
            return
        graph, tensor = tensors[node.input[place]]
        name = f"{tensor.name}.{'transposed' if transposed else 'plain'}{'' if factor == 1 else factor}"
        if name not in tensors:
            array = onnx.numpy_helper.to_array(tensor)
            array = np.swapaxes(array, -1, -2) if transposed else array
            _add(graph, tensors, array * array.dtype.type(factor), name)
        changed.add(tensor.name)
        node.input[place] = name

    for node in [node for node in nodes if node.op_type in ("FusedMatMul", "Gemm") and node.input[1] in tensors]:
        attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        alpha, beta = attributes.pop("alpha", 1.0), attributes.pop("beta", 1.0)
        transposed = bool(attributes.pop("transB", 0))
        if node.op_type == "Gemm":
            bias = node.input[2] if len(node.input) > 2 else ""
            if bias in tensors:
                changed.add(bias)
                bias = node.input[2] = _of_columns(
                    bias, tensors, tensors[node.input[1]][1].dims[0 if transposed else 1]
                )
            transposed = transposed and uses[node.input[1]] > 1
            done = {"alpha", *(["transB"] if transposed else [])}
            if not bias or bias in tensors:
                hold(node, 2, beta if bias else 1, transposed=False)
                done.add("beta")
            left = [attribute for attribute in node.attribute if attribute.name not in done]
        elif any(attributes.values()):
            continue
        else:
            node.op_type, node.domain, left = "MatMul", "", []
        hold(node, 1, alpha, transposed)
        del node.attribute[:]
        node.attribute.extend(left)
    used = {name for graph in graphs for node in graph.node for name in node.input}
    used |= {value.name for graph in graphs for value in graph.output}
    for name in changed - used:
        tensors[name][0].initializer.remove(tensors[name][1])
    return model


def _of_columns(bias: str, tensors: Tensors, columns: int) -> str:
    """The name of a tensor with a number for each column, from one that is the same for all rows."""
    graph, tensor = tensors[bias]
    if list(tensor.dims) == [columns] or math.prod(tensor.dims[:-1]) != 1:
        return bias
    name = f"{bias}.{columns}"
    if name not in tensors:
        _add(graph, tensors, np.broadcast_to(onnx.numpy_helper.to_array(tensor).reshape(-1), columns), name)
    return name


def _add(graph: onnx.GraphProto, tensors: Tensors, array: np.ndarray, name: str) -> None:
    """Add an initializer to a graph and to its index."""
    graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(array), name))
    tensors[name] = graph, graph.initializer[-1]

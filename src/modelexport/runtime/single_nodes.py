"""Runs one node in ONNX Runtime: an operator that only the runtime knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx


def run_node(node: onnx.NodeProto, opsets: Mapping[str, int], inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The outputs of a node. Inputs in float64 are given in float32, since such operators rarely take them.

    Raises:
        RuntimeError: The runtime cannot run it.
    """
    import onnxruntime  # rarely needed

    given = {
        name: array.astype(np.float32) if array.dtype == np.float64 else array
        for name, array in zip(node.input, inputs, strict=False)
        if name and array is not None
    }
    graph = onnx.helper.make_graph(
        [node],
        "node",
        [
            onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in given.items()
        ],
        [onnx.ValueInfoProto(name=name) for name in node.output if name],
    )
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in {node.domain: 1, **opsets}.items()]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found = iter(session.run(None, given))
    return tuple(next(found) if name else None for name in node.output)

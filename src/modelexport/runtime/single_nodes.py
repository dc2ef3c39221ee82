"""Runs one node in ONNX Runtime: an operator, or arguments of one, that nothing else here computes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from modelexport.runtime import CPU
from modelexport.runtime.saturating_products import unsigned_inputs


class NoKernelError(Exception):
    """ONNX Runtime has no kernel for a node with inputs of these types."""


def run_node(node: onnx.NodeProto, opsets: Mapping[str, int], inputs: Sequence[Any]) -> tuple[tuple[Any, ...], bool]:
    """The outputs of a node, and whether they were computed in the types of the inputs: without a kernel for float64,
    that is float32, or float64 with numbers inside that are rounded, where the operator is a function of others.

    Products of integers are exact, whatever the kernels of this processor do.

    Raises:
        NoKernelError: The runtime cannot run it.
        RuntimeError: It fails on these inputs.
    """
    if any(isinstance(array, list) for array in inputs):
        raise NoKernelError("a sequence cannot be given to a single node")
    node, inputs = unsigned_inputs(node, inputs)
    is_wide = any(array is not None and array.dtype == np.float64 for array in inputs)
    try:
        known = not is_wide or not node.domain or (node.domain, node.op_type) in _in_float64()
        return _run(node, opsets, inputs), known
    except NoKernelError:
        if not is_wide:
            raise
    narrow = [a.astype(np.float32) if a is not None and a.dtype == np.float64 else a for a in inputs]
    return _run(node, opsets, narrow), False


@functools.cache
def _in_float64() -> frozenset[tuple[str, str]]:
    """The domains and names of the operators that have a kernel for float64 on the CPU."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return frozenset(
        (kernel.domain, kernel.op_name)
        for kernel in state.get_all_opkernel_def()
        if kernel.provider == CPU and any("tensor(double)" in types for types in kernel.type_constraints.values())
    )


def _run(node: onnx.NodeProto, opsets: Mapping[str, int], inputs: Sequence[Any]) -> tuple[Any, ...]:
    import onnxruntime  # rarely needed

    from modelexport.runtime.sessions import session_options

    feeds = {name: array for name, array in zip(node.input, inputs, strict=False) if name and array is not None}
    graph = onnx.helper.make_graph(
        [node],
        "node",
        [
            onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in feeds.items()
        ],
        [onnx.ValueInfoProto(name=name) for name in node.output if name],
    )
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in {node.domain: 1, **opsets}.items()]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), session_options("none", CPU))
    except Exception as error:  # its classes are not public
        if any(phrase in str(error) for phrase in _UNKNOWN):
            raise NoKernelError(str(error)) from error
        raise
    try:
        results = iter(session.run(None, feeds))
    except Exception as error:  # its classes are not public, and some of them are no errors of Python's
        raise RuntimeError(str(error)) from error
    return tuple(next(results) if name else None for name in node.output)


_UNKNOWN = ("NOT_IMPLEMENTED", "INVALID_GRAPH", "is not a registered function")
"""What the runtime says of an operator that it does not know, or not for these types."""

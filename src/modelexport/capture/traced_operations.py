"""Which operation of PyTorch each node of a translated trace was made for: what its nodes pass to each other in half
precision is not rounded (:mod:`modelexport.graph.narrow_to_float32`), nor are the numbers of Python that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from modelexport.graph.narrow_to_float32 import NARROW, OPERATION, cast, graph_of, round_to
from modelexport.graph.nodes import all_nodes

_OPERATION, _NUMBERS, _TYPE = "modelexport_operation", "modelexport_numbers", "modelexport_type"
"""Attributes of translated nodes, until they are read: the position of the operation, its numbers of Python, and the
type of its result, where that is of half precision."""
_TYPES = {"Half": ir.DataType.FLOAT16.value, "BFloat16": ir.DataType.BFLOAT16.value}


def marking_operations(translate: Callable[..., Any]) -> Callable[..., Any]:
    """The exporter's function that translates a node of a trace, which marks the ONNX nodes that it makes."""
    position = count()

    def marked(graph: Any, block: Any, node: Any, inputs: Any, env: Any, known: Any, made: Any, *how: Any) -> Any:
        results = translate(graph, block, node, inputs, env, known, made, *how)
        taken = [value.toIValue() for value in node.inputs() if value.node().kind() == "prim::Constant"]
        numbers = [float(each) for each in taken if isinstance(each, torch.Tensor) and each.dtype is torch.float64]
        operation = next(position)
        for new in made:
            if new.kind().startswith("onnx::") and new.kind() != "onnx::Constant" and not new.hasAttribute(_OPERATION):
                new.i_(_OPERATION, operation).fs_(_NUMBERS, numbers)
        if made and isinstance(results, torch.Value) and results.node().hasAttribute(_OPERATION):
            traced = node.output().type()
            if traced.kind() == "TensorType" and traced.scalarType() in _TYPES:
                results.node().i_(_TYPE, _TYPES[traced.scalarType()])
        return results

    return marked


def read_operations(model: ir.Model) -> None:
    """Read the marks of the nodes, and remove them. The exporter inserts conversions, and converts numbers itself: such
    a node is of the operation that uses it. A result that the exporter has in float32 is rounded to its type, and has
    this type as an output of the graph.
    """
    for node in reversed(list(all_nodes(model))):
        mark, numbers, dtype = (node.attributes.pop(name, None) for name in (_OPERATION, _NUMBERS, _TYPE))
        users = {user.meta.get(OPERATION) for value in node.outputs for user, _ in value.uses()}
        if mark is not None:
            node.meta[OPERATION] = mark.as_int()
        elif node.op_type in ("Cast", "Constant") and len(users) == 1 and None not in users:
            node.meta[OPERATION] = users.pop()
        if dtype is not None and node.outputs[0].dtype is ir.DataType.FLOAT:
            rounded, wide = round_to(ir.DataType(dtype.as_int()), node.outputs[0], node)
            outputs = model.graph.outputs
            outputs[:] = [rounded if output is wide else output for output in outputs]
        floats = numbers.as_floats() if numbers is not None else ()
        for index, value in enumerate(node.inputs):
            if value is not None and (exact := _number_before_rounding(value, floats)) is not None:
                (number,) = exact.outputs
                rounding = cast(number, value.dtype or NARROW[0], f"{value.name}.{node.name}", node)
                rounding.meta[OPERATION] = exact.meta[OPERATION] = node.meta.get(OPERATION)
                graph_of(node).insert_before(node, [exact, rounding])
                node.replace_input_with(index, rounding.outputs[0])


def _number_before_rounding(value: ir.Value, numbers: Sequence[float]) -> ir.Node | None:
    """A constant with the one of some numbers that a value in half precision is, rounded; ``None`` if it is not one."""
    tensor = ir.convenience.get_const_tensor(value) if numbers else None
    if tensor is None or tensor.dtype not in NARROW or tensor.size != 1:
        return None
    rounded = tensor.numpy().reshape(())
    for number in numbers:
        if np.asarray(number).astype(rounded.dtype) == rounded and number != float(rounded):
            exact = ir.tensor(np.full(tensor.shape.numpy(), number, np.float32))
            return ir.Node("", "Constant", [], [ir.AttrTensor("value", exact)])
    return None

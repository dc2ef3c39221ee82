"""Computes what Python computes from sizes in float64, as Python does, and rounds it where it meets a tensor.

torch.onnx computes it in float32, in which the product of 100 and 0.57 is 57, and Python's is below it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.fx

from modelexport.graph.nodes import all_nodes
from modelexport.graph.properties import copy_facts
from modelexport.pytorch.private_torch import OpOverload

_KERNELS = frozenset(
    (
        "Abs", "Add", "Cast", "CastLike", "Ceil", "Div", "Equal", "Exp", "Floor", "Greater", "GreaterOrEqual",
        "Identity", "Less", "LessOrEqual", "Log", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Pow", "Reciprocal",
        "Reshape", "Round", "Sqrt", "Squeeze", "Sub", "Unsqueeze", "Where",
    )
)  # fmt: skip
"""Operators that ONNX Runtime's CPU provider has in float64."""


def compute_numbers_in_double(model: ir.Model) -> None:
    """Let the nodes that were made for numbers of Python compute in float64, in place.

    Args:
        model: A translated graph whose nodes refer to their FX nodes.
    """
    wide: dict[ir.Value, ir.Node] = {}
    for node in list(all_nodes(model)):
        fx_node = node.meta.get("node")
        if fx_node is None or not _is_of_numbers(fx_node) or node.op_type not in _KERNELS:
            continue
        if any(value.is_graph_output() for value in node.outputs):
            continue
        for index, value in enumerate(node.inputs):
            if value is not None and _dtype(value) is ir.DataType.FLOAT:
                node.replace_input_with(index, _in_double(value, node, fx_node))
        if node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.FLOAT:
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.DOUBLE)
        for value in node.outputs:
            if value.dtype is ir.DataType.FLOAT:
                value.type = ir.TensorType(ir.DataType.DOUBLE)
                wide[value] = node
    of_numbers = set(wide.values())
    for value, node in wide.items():
        users = [
            (user, index)
            for user, index in value.uses()
            if user not in of_numbers and not _is_of_numbers(user.meta.get("node")) and user.op_type != "Cast"
        ]
        if users:
            rounded = _new_node("Cast", [value], {"to": ir.DataType.FLOAT}, node)
            node.graph.insert_after(node, rounded)  # type: ignore[union-attr]
            rounded.outputs[0].type, rounded.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), value.shape
            for user, index in users:
                user.replace_input_with(index, rounded.outputs[0])


def _is_of_numbers(fx_node: torch.fx.Node | None) -> bool:
    """Whether an FX node is of numbers of Python, and not of tensors."""
    if fx_node is None or isinstance(fx_node.target, OpOverload):
        return False
    return isinstance(fx_node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def _dtype(value: ir.Value) -> ir.DataType | None:
    constant = ir.convenience.get_const_tensor(value)
    return value.dtype if constant is None else constant.dtype


def _in_double(value: ir.Value, node: ir.Node, fx_node: torch.fx.Node) -> ir.Value:
    """A value in float32 as a node in float64 takes it; a constant is the number that Python has."""
    constant = ir.convenience.get_const_tensor(value)
    if constant is None:
        made = _new_node("Cast", [value], {"to": ir.DataType.DOUBLE}, node)
    else:
        rounded = constant.numpy()
        numbers = [one for one in fx_node.args if isinstance(one, float) and np.float32(one) == rounded]
        exact = np.full(rounded.shape, numbers[0]) if numbers else rounded.astype(np.float64)
        made = _new_node("Constant", [], {"value": ir.tensor(exact)}, node)
    node.graph.insert_before(node, made)  # type: ignore[union-attr]
    made.outputs[0].type, made.outputs[0].shape = ir.TensorType(ir.DataType.DOUBLE), value.shape
    return made.outputs[0]


def _new_node(op_type: str, inputs: list[ir.Value], attributes: dict[str, Any], beside: ir.Node) -> ir.Node:
    made = ir.node(op_type, inputs, attributes)
    copy_facts(beside, made)
    return made

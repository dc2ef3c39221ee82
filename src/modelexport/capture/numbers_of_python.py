"""Translates arithmetic on sizes as Python computes it: quotients are rounded down, fractions are in float64.

torch.onnx writes ``Div``, which rounds towards zero, and float32, in which the product of 100 and 0.57 is 57 and not
below it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
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
            rounded = node_like("Cast", [value], {"to": ir.DataType.FLOAT}, node)
            node.graph.insert_after(node, rounded)  # type: ignore[union-attr]  # it is in a graph
            rounded.outputs[0].type, rounded.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), value.shape
            for user, index in users:
                user.replace_input_with(index, rounded.outputs[0])


def floor_quotients_of_sizes(model: ir.Model) -> None:
    """Let ``a // b`` of sizes be ``(a - a % b) / b`` where ``a`` may be negative, in place: ``-(-n // 4)``.

    Args:
        model: A translated graph whose nodes refer to their FX nodes.
    """
    for node in list(all_nodes(model)):
        fx_node = node.meta.get("node")
        if fx_node is None or fx_node.target is not operator.floordiv or node.op_type != "Div":
            continue
        dividend, divisor = node.inputs
        if not _may_be_negative(fx_node.args[0]) or dividend is None or divisor is None:
            continue
        rest = node_like("Mod", [dividend, divisor], {}, node)
        whole = node_like("Sub", [dividend, rest.outputs[0]], {}, node)
        for result in (*rest.outputs, *whole.outputs):
            result.type, result.shape = dividend.type, dividend.shape
        node.graph.insert_before(node, [rest, whole])  # type: ignore[union-attr]  # it is in a graph
        node.replace_input_with(0, whole.outputs[0])


def _may_be_negative(argument: object) -> bool:
    """Whether a size, or what is computed from sizes, may be below zero."""
    size = argument.meta.get("val") if isinstance(argument, torch.fx.Node) else argument
    if isinstance(size, torch.SymInt):
        return bool(size.node.shape_env.bound_sympy(size.node.expr).lower < 0)
    return not isinstance(size, int) or size < 0


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
        wide = node_like("Cast", [value], {"to": ir.DataType.DOUBLE}, node)
    else:
        rounded = constant.numpy()
        numbers = [number for number in fx_node.args if isinstance(number, float) and np.float32(number) == rounded]
        exact = np.full(rounded.shape, numbers[0]) if numbers else rounded.astype(np.float64)
        wide = node_like("Constant", [], {"value": ir.tensor(exact)}, node)
    node.graph.insert_before(node, wide)  # type: ignore[union-attr]  # it is in a graph
    wide.outputs[0].type, wide.outputs[0].shape = ir.TensorType(ir.DataType.DOUBLE), value.shape
    return wide.outputs[0]


def node_like(op_type: str, inputs: Sequence[ir.Value | None], attributes: dict[str, Any], other: ir.Node) -> ir.Node:
    """A new node that was made for the same FX node as another one, and has its metadata."""
    node = ir.node(op_type, inputs, attributes)
    copy_facts(other, node)
    return node

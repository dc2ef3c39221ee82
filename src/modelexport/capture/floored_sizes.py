"""Quotients of sizes are rounded down, as Python does: torch.onnx writes ``Div``, which rounds towards zero."""

from __future__ import annotations

import operator

import onnx_ir as ir
import torch
import torch.fx

from modelexport.graph.nodes import all_nodes
from modelexport.graph.properties import copy_facts


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
        rest = ir.node("Mod", [dividend, divisor])
        whole = ir.node("Sub", [dividend, rest.outputs[0]])
        copy_facts(node, rest, whole)
        for made in (rest, whole):
            made.outputs[0].type, made.outputs[0].shape = dividend.type, dividend.shape
        node.graph.insert_before(node, [rest, whole])  # type: ignore[union-attr]
        node.replace_input_with(0, whole.outputs[0])


def _may_be_negative(argument: object) -> bool:
    """Whether a size, or what is computed from sizes, may be below zero."""
    size = argument.meta.get("val") if isinstance(argument, torch.fx.Node) else argument
    if isinstance(size, torch.SymInt):
        return bool(size.node.shape_env.bound_sympy(size.node.expr).lower < 0)
    return not isinstance(size, int) or size < 0

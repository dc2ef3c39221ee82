"""The class of a module that is not recorded, guessed from the operators of a call; marked with a question mark."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from modelexport.graph.operator_kinds import CASTS, KEEPS_ORDER

MARK = "?"
"""The end of a class name that is a guess."""

_BY_OPERATOR = {
    "LayerNormalization": "LayerNorm",
    "BatchNormalization": "BatchNorm",
    "InstanceNormalization": "InstanceNorm",
    "GroupNormalization": "GroupNorm",
    "RMSNormalization": "RMSNorm",
    "LSTM": "LSTM",
    "GRU": "GRU",
    "RNN": "RNN",
    "Gemm": "Linear",
    "MaxPool": "MaxPool",
    "AveragePool": "AvgPool",
    "GlobalAveragePool": "AdaptiveAvgPool",
    "Softmax": "Softmax",
    "Relu": "ReLU",
    "LeakyRelu": "LeakyReLU",
    "PRelu": "PReLU",
    "Gelu": "GELU",
    "Erf": "GELU",
    "HardSwish": "Hardswish",
    "HardSigmoid": "Hardsigmoid",
    "Sigmoid": "Sigmoid",
    "Tanh": "Tanh",
}
_WITH_WEIGHTS = {"Conv": "Conv", "ConvTranspose": "ConvTranspose", "MatMul": "Linear", "Gather": "Embedding"}
_BESIDE = KEEPS_ORDER | CASTS | {"Add", "Constant", "Div", "Mul", "Transpose"}
"""Operators that say nothing about a class."""


def guess_class(nodes: Iterable[ir.Node]) -> str:
    """The class that computes what a call's own nodes compute, with a question mark; empty if that is not clear."""
    telling = [node for node in nodes if node.op_type not in _BESIDE]
    if len(telling) != 1:
        return ""
    (node,) = telling
    name = _BY_OPERATOR.get(node.op_type, "")
    if node.op_type in _WITH_WEIGHTS:
        weights = [value for value in node.inputs if value is not None and value.const_value is not None]
        rank = max((len(value.const_value.shape) for value in weights if value.const_value is not None), default=0)
        name = _WITH_WEIGHTS[node.op_type] if rank >= 2 else ""
        if name.startswith("Conv"):
            name = f"{name}{rank - 2}d" if rank > 2 else name
    return name and name + MARK

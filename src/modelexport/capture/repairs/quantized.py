"""The call of a linear layer with a packed weight: ``MatMulNBits`` or ``MatMulBnb4`` of ONNX Runtime.

Sizes of groups that those do not have become ``DequantizeLinear`` and ``MatMul``. ``MatMulNBits``' input ``g_idx``
is not used: it is deprecated, and ONNX Runtime 1.31.1 computes something else with it and zero points. The columns of
the weight are sorted instead, and those of the input by ``Gather``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import onnx_ir as ir
from onnxscript import evaluator
from onnxscript import opset18 as op

from modelexport.capture.repairs.constants import ints
from modelexport.errors import WeightsError
from modelexport.format.dtypes import dtype_name
from modelexport.pytorch.quantized import OPERATOR
from modelexport.weights.packed.operators import (
    DOMAIN,
    VERSION,
    Packing,
    block_size,
    is_table,
    packing,
    result_type,
    roles_of,
)
from modelexport.weights.packed.scheme import Scheme

RUNTIME = "com.microsoft"

_FOUR_BIT_TABLES = {"fp4": 0, "nf4": 1}
"""The attribute ``quant_type`` of ``MatMulBnb4``."""


def linear() -> dict[Any, Any]:
    """The operator of packed linear layers to its translation."""
    return {OPERATOR: _translated}


def _translated(inputs: Any, tensors: Sequence[Any], bias: Any = None, scheme: str = "") -> Any:
    known = msgspec.json.decode(scheme, type=Scheme)
    block = known.group if is_table(known) else block_size(known)
    wanted = packing(known, block, dtype_name(inputs.dtype))
    by_role = dict(zip(known.roles, tensors, strict=True))
    codes, scales = _part("Codes", wanted, by_role), _part("Scales", wanted, by_role)
    if is_table(known):
        return _by_table(inputs, codes, scales, bias, wanted)
    if known.ordered:
        inputs = op.Gather(inputs, _part("Order", wanted, by_role), axis=-1)
    zero_points = _part("ZeroPoints", wanted, by_role)
    if block:
        sizes = {"K": known.columns, "N": known.rows, "bits": known.bits, "block_size": block, "accuracy_level": 0}
        return _node(RUNTIME, "MatMulNBits", [inputs, codes, scales, zero_points, None, bias], sizes)
    return _dense(inputs, codes, scales, zero_points, bias, wanted)


def _part(operator: str, wanted: Packing, tensors: dict[str, Any]) -> Any:
    """A part of a weight; ``None`` if it has none."""
    roles = roles_of(operator, wanted)
    if not roles:
        return None
    part = _node(DOMAIN, operator, [tensors[role] for role in roles], msgspec.to_builtins(wanted))
    dtype, shape = result_type(operator, wanted)
    part.type, part.shape = ir.TensorType(dtype), ir.Shape(shape)
    return part


def _by_table(inputs: Any, codes: Any, scales: Any, bias: Any, wanted: Packing) -> Any:
    if block_size(wanted) == 0 or wanted.group & (wanted.group - 1):
        raise WeightsError(
            f"blocks of {wanted.group} numbers of {wanted.variant}: MatMulBnb4 takes powers of two from 16"
        )
    sizes = {
        "K": wanted.columns,
        "N": wanted.rows,
        "block_size": wanted.group,
        "quant_type": _FOUR_BIT_TABLES[wanted.variant],
    }
    result = _node(RUNTIME, "MatMulBnb4", [inputs, codes, scales], sizes)
    return result if bias is None else op.Add(result, bias)


def _dense(inputs: Any, codes: Any, scales: Any, zero_points: Any, bias: Any, wanted: Packing) -> Any:
    if zero_points is None:
        middle = op.Constant(value=ir.tensor([2 ** (wanted.bits - 1)], dtype=ir.DataType.UINT8))
        zero_points = op.Expand(middle, ints(wanted.rows * wanted.columns // wanted.group))
    values = op.DequantizeLinear(codes, scales, zero_points, axis=0)
    weight = op.Reshape(values, ints(wanted.rows, wanted.columns))
    result = op.MatMul(inputs, op.Transpose(weight, perm=[1, 0]))
    return result if bias is None else op.Add(result, bias)


def _node(domain: str, op_type: str, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Record a node of an operator that onnxscript does not know, as its own are recorded; its result."""
    while inputs[-1] is None:
        inputs.pop()
    node = ir.node(op_type, inputs, attributes, domain=domain, version=VERSION)
    recorder: Any = evaluator.default()
    recorder.nodes.append(node)
    return node.outputs[0]

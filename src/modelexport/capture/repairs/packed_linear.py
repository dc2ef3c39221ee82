"""The call of a linear layer with a packed weight: ``MatMulNBits`` or ``MatMulBnb4`` of ONNX Runtime, or ``qdq``.

That is ``DequantizeLinear`` with blocks, and ``MatMul``; also for sizes of groups that ``MatMulNBits`` does not have.
The input ``g_idx`` of that is not used: it is deprecated, and ONNX Runtime 1.31.1 computes something else with it and
zero points. The columns of the weight are sorted instead, and those of the input by ``Gather``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import onnx_ir as ir
from onnxscript import evaluator
from onnxscript import opset18 as op
from torch import nn

from modelexport.capture.front_end_options import QuantizedForm
from modelexport.errors import UsageError, WeightsError
from modelexport.format.dtypes import dtype_name
from modelexport.pytorch.checkpoints.quantized_linear import OPERATOR, packed_schemes
from modelexport.weights.packed.repacking import (
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


_BLOCKS_OPSET = 21
"""The first opset whose ``DequantizeLinear`` has blocks and numbers of four bits."""


def opset_for(model: nn.Module, opset: int | None, form: QuantizedForm) -> int | None:
    """The opset to export a model with: the given one, or a later one if its packed layers need that."""
    schemes = packed_schemes(model)
    tables = sorted({scheme.variant for scheme in schemes if is_table(scheme)})
    if tables and form.quantized_as == "qdq":
        raise UsageError(
            f"DequantizeLinear multiplies integers, and {tables[0]} is a table of values: leave out --quantized-as qdq"
        )
    groups = [scheme.group for scheme in schemes if not _block(scheme, form)]
    if groups and opset is not None and opset < _BLOCKS_OPSET:
        raise UsageError(
            f"groups of {groups[0]} numbers need DequantizeLinear with blocks, which opset {opset} does not have: "
            f"choose opset {_BLOCKS_OPSET} or later"
        )
    return _BLOCKS_OPSET if groups and opset is None else opset


def _block(scheme: Scheme, form: QuantizedForm) -> int:
    """The size of blocks in the operators of ONNX Runtime; 0 for those of the standard."""
    if is_table(scheme):
        return scheme.group
    return 0 if form.quantized_as == "qdq" else block_size(scheme)


def linear(form: QuantizedForm) -> dict[Any, Any]:
    """The operator of packed linear layers to its translation."""

    def translate(inputs: Any, tensors: Sequence[Any], bias: Any = None, scheme: str = "") -> Any:
        return _translated(form, inputs, tensors, bias, scheme)

    return {OPERATOR: translate}


def _translated(form: QuantizedForm, inputs: Any, tensors: Sequence[Any], bias: Any, scheme: str) -> Any:
    known = msgspec.json.decode(scheme, type=Scheme)
    block = _block(known, form)
    wanted = packing(known, block, dtype_name(inputs.dtype))
    by_role = dict(zip(known.roles, tensors, strict=True))
    codes, scales = _part("Codes", wanted, by_role), _part("Scales", wanted, by_role)
    if is_table(known):
        return _by_table(inputs, codes, scales, bias, wanted)
    if known.ordered:
        inputs = op.Gather(inputs, _part("Order", wanted, by_role), axis=-1)
    zero_points = _part("ZeroPoints", wanted, by_role)
    if block:
        sizes = {"K": known.columns, "N": known.rows, "bits": known.bits, "block_size": block}
        sizes["accuracy_level"] = form.accuracy_level
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
    sizes = {"axis": 0, "block_size": wanted.group}
    weight = _node("", "DequantizeLinear", [codes, scales, zero_points], sizes)
    weight.type, weight.shape = ir.TensorType(scales.dtype), codes.shape
    result = op.MatMul(inputs, weight)
    return result if bias is None else op.Add(result, bias)


def _node(domain: str, op_type: str, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Record a node of an operator that onnxscript does not know, as its own are recorded; its result."""
    while inputs[-1] is None:
        inputs.pop()
    node = ir.node(op_type, inputs, attributes, domain=domain, version=None if not domain else VERSION)
    recorder: Any = evaluator.default()
    recorder.nodes.append(node)
    return node.outputs[0]

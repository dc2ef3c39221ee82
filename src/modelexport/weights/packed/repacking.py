"""Operators that compute what a file has of a packed weight from the tensors of a checkpoint.

A graph has them only between its capture and the folding of parameters; a file has them as steps of transforms.

- ``Codes``: the numbers, of a table uint8 ``[rows * columns / 2]``. Columns are sorted by their groups.
- ``Scales``: cast to ``dtype``.
- ``ZeroPoints``
- ``Order``: int64 ``[columns]``, the columns sorted by their groups.

With blocks they are for ``MatMulNBits``: uint8 ``[rows, blocks, block * bits / 8]``, ``[rows, blocks]``, and uint8
``[rows, ceil(blocks * bits / 8)]``; blocks of one group have the same scale. Without, they are for
``DequantizeLinear``: ``[columns, rows]`` and ``[groups, rows]`` of the smallest integers of opset 21, which are signed
if the weight has no zero points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir

from modelexport.errors import FileFormatError, WeightsError
from modelexport.format.documents import TransformStep
from modelexport.format.dtypes import parse_dtype
from modelexport.weights.packed.bit_packing import pack, unpack
from modelexport.weights.packed.known_formats import FORMATS
from modelexport.weights.packed.scheme import Component, Scheme, Tensors, consecutive, order_of

DOMAIN, VERSION = "modelexport.packed", 1

_NIBBLE = 4
_SMALLEST_BLOCK, _LARGEST_BLOCK = 16, 256
"""The sizes of blocks for which ONNX Runtime has kernels; they are powers of two."""


class Packing(Scheme, frozen=True, kw_only=True):
    """A scheme, and the layout to compute: the attributes of an operator."""

    block: int
    """Consecutive columns that have one scale in the file; 0: as many as the scheme says, for ``DequantizeLinear``."""
    dtype: str = "float32"
    """The element type of scales."""


def block_size(scheme: Scheme) -> int:
    """The largest block for ONNX Runtime's kernels that divides a group; 0 if there is none."""
    power = scheme.group & -scheme.group
    return min(power, _LARGEST_BLOCK) if power >= _SMALLEST_BLOCK else 0


def packing(scheme: Scheme, block: int, dtype: str) -> Packing:
    return Packing(**msgspec.structs.asdict(scheme), block=block, dtype=dtype)


def roles_of(operator: str, scheme: Scheme) -> tuple[str, ...]:
    """The roles of an operator's inputs, in order; none if the weight has no such part."""
    known = FORMATS[scheme.format]
    parts = {
        "Codes": (known.codes, known.groups),
        "Scales": (known.scales,),
        "ZeroPoints": (known.zero_points,),
        "Order": (known.groups,) if scheme.ordered else (),
    }
    roles = (role for part in parts[operator] if part is not None for role in part.roles)
    return tuple(role for role in roles if role in scheme.roles)


def result_type(operator: str, wanted: Packing) -> tuple[ir.DataType, tuple[int, ...]]:
    """The element type and the shape of an operator's result."""
    rows, columns, block = wanted.rows, wanted.columns, wanted.block
    groups = -(-rows * columns // wanted.group)
    table, numbers = is_table(wanted), ir.DataType.UINT8 if block or is_table(wanted) else _integers(wanted)
    match operator:
        case "Order":
            return ir.DataType.INT64, (columns,)
        case "Scales":
            by_block = (rows, columns // block) if block else (columns // wanted.group, rows)
            return parse_dtype(wanted.dtype), (groups,) if table else by_block
        case "ZeroPoints":
            packed = (rows, -(-(columns // block) * wanted.bits // 8)) if block else ()
            return numbers, packed or (columns // wanted.group, rows)
    if table:
        return numbers, (rows * columns * wanted.bits // 8,)
    return numbers, (rows, columns // block, block * wanted.bits // 8) if block else (columns, rows)


def _integers(wanted: Packing) -> ir.DataType:
    """The type of numbers for ``DequantizeLinear``."""
    if roles_of("ZeroPoints", wanted):
        return ir.DataType.UINT8 if wanted.bits > _NIBBLE else ir.DataType.UINT4
    return ir.DataType.INT8 if wanted.bits > _NIBBLE else ir.DataType.INT4


def is_table(scheme: Scheme) -> bool:
    return FORMATS[scheme.format].table is not None


def is_unchanged(operator: str, wanted: Packing, dtype: ir.DataType) -> bool:
    """Whether the bytes of the first input, of this type, are those of the result, which then need not be computed."""
    known = FORMATS[wanted.format]
    if operator == "Scales":
        return (
            known.scales.is_bytes
            and dtype == parse_dtype(wanted.dtype)
            and (is_table(wanted) or wanted.block == wanted.group)
        )
    whole = wanted.columns * wanted.bits % 32 == 0 or is_table(wanted)
    return operator == "Codes" and known.codes.is_bytes and not wanted.ordered and wanted.block > 0 and whole


def run(operator: str, attributes: Mapping[str, Any], inputs: Sequence[np.ndarray]) -> np.ndarray:
    """The result of an operator."""
    try:
        wanted = msgspec.convert(dict(attributes), Packing, strict=False)
        roles = roles_of(operator, wanted)
    except (msgspec.ValidationError, KeyError) as error:
        raise FileFormatError(f"{operator} is not an operator for this packed weight: export the file again") from error
    result = _computed(operator, wanted, dict(zip(roles, inputs, strict=True)))
    dtype, shape = result_type(operator, wanted)
    return np.ascontiguousarray(result.reshape(shape).astype(dtype.numpy(), copy=False))


def packed_size(steps: Sequence[TransformStep]) -> int | None:
    """How many numbers of a weight an initializer holds, in whatever number of bits (0 for the order of its columns).

    ``None`` if it is not packed.
    """
    if not steps or steps[-1].domain != DOMAIN:
        return None
    wanted = msgspec.convert(dict(steps[-1].attributes), Packing, strict=False)
    return {"Codes": wanted.rows * wanted.columns, "Order": 0}.get(
        steps[-1].op_type, wanted.rows * wanted.columns // (wanted.block or wanted.group)
    )


def _codes(wanted: Packing, tensors: Tensors) -> np.ndarray:
    packed = FORMATS[wanted.format].codes.compute(wanted, tensors)
    if is_table(wanted):
        return packed
    order = _order(wanted, tensors)
    if order is None and wanted.block:
        return packed
    numbers = unpack(packed, wanted.bits, wanted.columns)
    numbers = numbers if order is None else numbers[:, order]
    if wanted.block:
        return pack(numbers, wanted.bits)
    is_signed = _integers(wanted).is_signed()
    return numbers.T.astype(np.int16) - (2 ** (wanted.bits - 1) if is_signed else 0)


def _order(wanted: Packing, tensors: Tensors) -> np.ndarray | None:
    """The order of the columns; ``None`` if it is their own."""
    part = FORMATS[wanted.format].groups
    if part is None or not set(part.roles) <= set(tensors):
        return None
    groups = part.compute(wanted, tensors)
    if wanted.ordered:
        return order_of("the layer", wanted, groups)
    if not consecutive(wanted, groups):
        raise WeightsError(
            f"{part.roles[0]} has groups of columns that are not consecutive, unlike the weights that the file was "
            "exported with: export the model again"
        )
    return None


def _by_block(wanted: Packing, part: Component, tensors: Tensors) -> np.ndarray:
    values = part.compute(wanted, tensors)
    if is_table(wanted):
        return values
    return np.repeat(values, wanted.group // wanted.block, axis=1) if wanted.block else values.T


def _computed(operator: str, wanted: Packing, tensors: Tensors) -> np.ndarray:
    known = FORMATS[wanted.format]
    match operator:
        case "Codes":
            return _codes(wanted, tensors)
        case "Scales":
            return _by_block(wanted, known.scales, tensors)
        case "Order":
            order = _order(wanted, tensors)
            assert order is not None, "only ordered weights have this part"
            return order
    assert known.zero_points is not None, "a table has no zero points"
    values = _by_block(wanted, known.zero_points, tensors)
    return pack(values, wanted.bits) if wanted.block else values

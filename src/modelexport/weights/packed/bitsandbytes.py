"""bitsandbytes, 4 bits: ``weight``, ``weight.absmax``, ``weight.quant_map`` and ``weight.quant_state``.

Specification: ``QuantState`` and ``dequantize_4bit`` in ``bitsandbytes/functional.py`` of bitsandbytes-foundation.

- ``weight`` uint8 ``[rows * columns / 2, 1]``: the rows one after the other, the first number in the higher bits.
- ``weight.quant_map`` float32 ``[16]``: the value of each number, a fixed table for ``nf4`` and for ``fp4``.
- ``weight.absmax``, for each block of ``blocksize`` numbers: float32, or uint8 where it is quantized itself. Then it is
  ``nested_quant_map[number] * nested_absmax[block of nested_blocksize] + nested_offset``.
- ``weight.quant_state.bitsandbytes__nf4`` uint8: a JSON object with the sizes and the offset.
- A weight is ``quant_map[number] * absmax``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import numpy as np

from modelexport.errors import WeightsError
from modelexport.weights.packed.scheme import Component, Format, Reader, Scheme, Tensors

_STATE = "weight.quant_state.bitsandbytes__"

# ``create_normal_map`` and ``get_4bit_type`` of bitsandbytes, in its order of numbers.
_TABLES = {
    "nf4": [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    "fp4": [sign * value / 12 for sign in (1, -1) for value in (0, 0.0625, 8, 12, 4, 6, 2, 3)],
}


def _find(settings: Mapping[str, Any], checkpoint: Reader) -> dict[str, Scheme]:
    if not settings.get("load_in_4bit", settings.get("_load_in_4bit")):
        raise WeightsError("the checkpoint has bitsandbytes weights of 8 bits: modelexport reads nf4 and fp4")
    return {
        layer: _scheme(layer, checkpoint, table) for table in _TABLES for layer in checkpoint.layers(f"{_STATE}{table}")
    }


def _scheme(layer: str, checkpoint: Reader, table: str) -> Scheme:
    state = _state(layer, checkpoint.read(f"{layer}.{_STATE}{table}"))
    (rows, columns), block, nested = state.shape, state.blocksize, state.nested_blocksize
    if rows * columns % 2:
        raise WeightsError(f"{layer}.{_STATE}{table} has impossible sizes: copy or download the checkpoint again")
    blocks = -(-rows * columns // block)
    checkpoint.check(f"{layer}.weight", (rows * columns // 2, 1), "uint8")
    checkpoint.check(f"{layer}.weight.quant_map", (16,), "float32")
    checkpoint.check(f"{layer}.weight.absmax", (blocks,), "uint8" if nested else "float32")
    if not np.allclose(checkpoint.read(f"{layer}.weight.quant_map"), _TABLES[table], rtol=0, atol=1e-6):
        raise WeightsError(f"{layer}.weight.quant_map is not the table of {table}: save the checkpoint again")
    roles = ["weight", "weight.absmax", f"{_STATE}{table}"]
    if nested:
        checkpoint.check(f"{layer}.weight.nested_absmax", (-(-blocks // nested),), "float32")
        checkpoint.check(f"{layer}.weight.nested_quant_map", (256,), "float32")
        roles += ["weight.nested_absmax", "weight.nested_quant_map"]
    return Scheme(
        format="bitsandbytes", rows=rows, columns=columns, bits=4, group=block, roles=tuple(roles), variant=table
    )


class _State(msgspec.Struct):
    """The JSON in the entry ``quant_state``."""

    shape: tuple[int, int]
    blocksize: Annotated[int, msgspec.Meta(ge=1)]
    nested_blocksize: Annotated[int, msgspec.Meta(ge=1)] | None = None
    nested_offset: float = 0.0


def _state(layer: str, array: np.ndarray) -> _State:
    try:
        return msgspec.json.decode(array.astype(np.uint8).tobytes(), type=_State)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise WeightsError(
            f"{layer} has a damaged quant_state ({error}): copy or download the checkpoint again"
        ) from error


def _scales(scheme: Scheme, tensors: Tensors) -> np.ndarray:
    absmax = tensors["weight.absmax"]
    if "weight.nested_absmax" not in tensors:
        return absmax
    state = _state("the layer", tensors[f"{_STATE}{scheme.variant}"])
    outer = np.repeat(tensors["weight.nested_absmax"], state.nested_blocksize or 1)[: absmax.size]
    return tensors["weight.nested_quant_map"][absmax] * outer + np.float32(state.nested_offset)


FORMAT = Format(
    find=_find,
    codes=Component(("weight",), lambda scheme, tensors: tensors["weight"].reshape(-1), is_bytes=True),
    scales=Component(
        (
            "weight.absmax",
            "weight.nested_absmax",
            "weight.nested_quant_map",
            *(f"{_STATE}{table}" for table in _TABLES),
        ),
        _scales,
        is_bytes=True,
    ),
    table=lambda scheme: np.array(_TABLES[scheme.variant], np.float32),
    unread=("weight.quant_map",),
)

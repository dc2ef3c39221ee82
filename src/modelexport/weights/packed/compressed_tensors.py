"""compressed-tensors, ``pack-quantized``: ``weight_packed``, ``weight_scale``, ``weight_zero_point``, ``weight_g_idx``.

Specification: ``compressors/pack_quantized`` of vllm-project/compressed-tensors, whose ``pack_to_int32`` adds
``2 ** (bits - 1)`` to each signed number and packs them along the last axis, the first in the lowest bits.

- ``weight_packed`` int32 ``[rows, ceil(columns * bits / 32)]``; ``weight_shape`` int64 ``[2]``: rows and columns.
- ``weight_scale`` ``[rows, groups]``; with the strategy ``channel`` one group.
- ``weight_zero_point``, if the numbers are not symmetric: int32 ``[ceil(rows * bits / 32), groups]``, packed alike
  along the rows, or int8 ``[rows, groups]``.
- ``weight_g_idx`` int32 ``[columns]``, with activation order: the group of each column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from modelexport.errors import WeightsError
from modelexport.weights.packed.bit_packing import bytes_of_words, unpack
from modelexport.weights.packed.scheme import (
    FLOATS,
    Component,
    Format,
    Reader,
    Scheme,
    Tensors,
    setting,
    whole_groups,
    with_groups,
)


def _find(settings: Mapping[str, Any], checkpoint: Reader) -> dict[str, Scheme]:
    widths = _widths(settings)
    schemes = {}
    for layer in checkpoint.layers("weight_packed"):
        checkpoint.check(f"{layer}.weight_shape", (2,), "int64", "int32")
        rows, columns = map(int, checkpoint.read(f"{layer}.weight_shape"))
        schemes[layer] = _scheme(layer, checkpoint, rows, columns, widths)
    return schemes


def _widths(settings: Mapping[str, Any]) -> dict[int, list[int]]:
    """The bits of numbers to the sizes of groups that the configuration allows with them, -1 for whole rows."""
    widths: dict[int, list[int]] = {}
    for group in setting(settings, "config_groups", dict).values():
        weights = (group.get("weights") if isinstance(group, dict) else None) or {}
        packing = group.get("format") or settings.get("format")
        bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
        if packing != "pack-quantized" or group.get("input_activations") or kind != "int":
            raise WeightsError(
                f"the checkpoint has compressed-tensors in the format {packing} with numbers of type {kind}"
                f"{' and quantized activations' if group.get('input_activations') else ''}: modelexport reads "
                "pack-quantized weights of type int alone"
            )
        if bits not in (4, 8) or strategy not in ("group", "channel"):
            raise WeightsError(
                f"the checkpoint has compressed-tensors of {bits} bits by {strategy}: modelexport reads 4 and 8 bits "
                "by group and by channel"
            )
        size = setting(weights, "group_size", int) if strategy == "group" else -1
        widths.setdefault(bits, []).append(size)
    return widths


def _scheme(layer: str, checkpoint: Reader, rows: int, columns: int, widths: Mapping[int, list[int]]) -> Scheme:
    packed, scale = f"{layer}.weight_packed", f"{layer}.weight_scale"
    shape = checkpoint.places[packed].shape
    bits = next((bits for bits in widths if shape == (rows, -(-columns * bits // 32))), next(iter(widths), 4))
    checkpoint.check(packed, (rows, -(-columns * bits // 32)), "int32")
    sizes = [whole_groups(layer, columns, size) for size in widths[bits]]
    groups = checkpoint.places[scale].shape[-1] if scale in checkpoint.places and checkpoint.places[scale].shape else 1
    size = next((size for size in sizes if size * groups == columns), sizes[0])
    groups = columns // size
    checkpoint.check(scale, (rows, groups), *FLOATS)
    roles = ["weight_packed", "weight_scale"]
    if (zeros := f"{layer}.weight_zero_point") in checkpoint.places:
        if checkpoint.places[zeros].shape == (rows, groups) and rows * bits > 32:
            checkpoint.check(zeros, (rows, groups), "int8")
        else:
            checkpoint.check(zeros, (-(-rows * bits // 32), groups), "int32")
        roles.append("weight_zero_point")
    scheme = Scheme(format="compressed-tensors", rows=rows, columns=columns, bits=bits, group=size, roles=tuple(roles))
    return with_groups(scheme, layer, checkpoint, "weight_g_idx")


def _codes(scheme: Scheme, tensors: Tensors) -> np.ndarray:
    packed = bytes_of_words(tensors["weight_packed"])
    return packed[:, : -(-scheme.columns * scheme.bits // 8)]


def _zero_points(scheme: Scheme, tensors: Tensors) -> np.ndarray:
    stored = tensors.get("weight_zero_point")
    middle = 2 ** (scheme.bits - 1)
    if stored is None:
        return np.full((scheme.rows, scheme.columns // scheme.group), middle, np.uint8)
    if stored.dtype == np.int8:
        return (stored.astype(np.int16) + middle).astype(np.uint8)
    return unpack(bytes_of_words(stored.T), scheme.bits, scheme.rows).T


FORMAT = Format(
    find=_find,
    codes=Component(("weight_packed",), _codes, is_bytes=True),
    scales=Component(("weight_scale",), lambda scheme, tensors: tensors["weight_scale"], is_bytes=True),
    zero_points=Component(("weight_zero_point",), _zero_points),
    groups=Component(("weight_g_idx",), lambda scheme, tensors: tensors["weight_g_idx"].astype(np.int32)),
    unread=("weight_shape",),
)

"""GPTQ: ``qweight``, ``qzeros``, ``scales`` and ``g_idx``, as AutoGPTQ and GPTQModel write them.

Specification: ``pack`` and ``dequantize_weight`` in ``gptqmodel/nn_modules/qlinear/__init__.py`` of
ModelCloud/GPTQModel, and ``convert_gptq_v1_to_v2_format_module`` in its ``gptqmodel/utils/model.py``.

- ``qweight`` int32 ``[columns * bits / 32, rows]``: along the columns, the first in the lowest bits.
- ``qzeros`` int32 ``[groups, rows * bits / 32]``: along the rows. In version 1, the usual one, each word is the packed
  zero points minus a packed one for each; carries go from number to number.
- ``scales`` ``[groups, rows]``; ``g_idx`` int32 ``[columns]``: the group of each column.
- A weight is ``scale * (number - zero point)``.
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

_VERSIONS = {"gptq": "1", "gptq_v2": "2"}


def _find(settings: Mapping[str, Any], checkpoint: Reader) -> dict[str, Scheme]:
    bits, group = setting(settings, "bits", int), setting(settings, "group_size", int)
    named = settings.get("checkpoint_format", settings.get("format", "gptq")) or "gptq"
    if named not in _VERSIONS:
        raise WeightsError(
            f"the checkpoint has the GPTQ format {named!r}: convert it to gptq or gptq_v2, which modelexport reads"
        )
    how = bits, group, _VERSIONS[named], bool(settings.get("dynamic"))
    return {layer: _scheme(layer, checkpoint, *how) for layer in checkpoint.layers("qweight")}


def _scheme(
    layer: str, checkpoint: Reader, bits: int, group: int, version: str, settings_differ_by_layer: bool
) -> Scheme:
    """The scheme of a layer.

    Args:
        settings_differ_by_layer: Bits and group size are then computed from the shapes of the layer's tensors.
    """
    names = {role: f"{layer}.{role}" for role in ("qweight", "qzeros", "scales", "g_idx")}
    shapes = {role: checkpoint.places[name].shape for role, name in names.items() if name in checkpoint.places}
    if len(shapes["qweight"]) != 2:
        raise WeightsError(f"{names['qweight']} has {len(shapes['qweight'])} axes and should have 2")
    words, rows = shapes["qweight"]
    if settings_differ_by_layer and "g_idx" in shapes and len(shapes.get("scales", ())) == 2 and shapes["scales"][0]:
        columns = shapes["g_idx"][0]
        bits, group = words * 32 // max(columns, 1), columns // shapes["scales"][0]
    if bits not in (2, 4, 8):
        raise WeightsError(f"{layer} has numbers of {bits} bits: modelexport reads GPTQ with 2, 4 and 8")
    columns = words * 32 // bits
    size = whole_groups(layer, columns, group)
    checkpoint.check(names["qweight"], (words, rows), "int32")
    checkpoint.check(names["qzeros"], (columns // size, -(-rows * bits // 32)), "int32")
    checkpoint.check(names["scales"], (columns // size, rows), *FLOATS)
    roles: tuple[str, ...] = ("qweight", "qzeros", "scales")
    scheme = Scheme(format="gptq", rows=rows, columns=columns, bits=bits, group=size, roles=roles, variant=version)
    return with_groups(scheme, layer, checkpoint, "g_idx")


def _codes(scheme: Scheme, tensors: Tensors) -> np.ndarray:
    words, rows = tensors["qweight"].shape
    return bytes_of_words(tensors["qweight"].T).reshape(rows, words * 4)


def _zero_points(scheme: Scheme, tensors: Tensors) -> np.ndarray:
    words = tensors["qzeros"].view(np.uint32)
    if scheme.variant == "1":
        words = words + np.uint32(sum(1 << shift for shift in range(0, 32, scheme.bits)))
    return unpack(bytes_of_words(words.view(np.int32)), scheme.bits, scheme.rows).T


FORMAT = Format(
    find=_find,
    codes=Component(("qweight",), _codes),
    scales=Component(("scales",), lambda scheme, tensors: tensors["scales"].T),
    zero_points=Component(("qzeros",), _zero_points),
    groups=Component(("g_idx",), lambda scheme, tensors: tensors["g_idx"].astype(np.int32)),
)

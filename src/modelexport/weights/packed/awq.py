"""AWQ, version GEMM: ``qweight``, ``qzeros`` and ``scales``, as AutoAWQ writes them.

Specification: ``awq/utils/packing_utils.py`` and ``WQLinear_GEMM.from_linear`` in ``awq/modules/linear/gemm.py`` of
casper-hansen/AutoAWQ.

- ``qweight`` int32 ``[columns, rows / 8]``: eight rows in a word, of which the lowest bits are row 0, then 2, 4, 6, 1,
  3, 5 and 7.
- ``qzeros`` int32 ``[groups, rows / 8]``, packed alike; ``scales`` ``[groups, rows]``.
- A weight is ``scale * (number - zero point)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from modelexport.errors import WeightsError
from modelexport.weights.packed.bit_packing import bytes_of_words, pack, unpack
from modelexport.weights.packed.scheme import FLOATS, Component, Format, Reader, Scheme, setting, whole_groups

_BITS = 4
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""The place in a word of each of eight rows."""


def _find(settings: Mapping[str, Any], checkpoint: Reader) -> dict[str, Scheme]:
    bits, group = setting(settings, "bits", int), setting(settings, "group_size", int)
    version = str(settings.get("version", settings.get("format", "gemm"))).lower()
    if bits != _BITS or version != "gemm":
        raise WeightsError(
            f"the checkpoint has AWQ numbers of {bits} bits in version {version}: modelexport reads 4 bits in version "
            "gemm"
        )
    schemes = {}
    for layer in checkpoint.layers("qweight"):
        shape = checkpoint.places[f"{layer}.qweight"].shape
        columns, words = shape if len(shape) == 2 else (0, 0)
        size = whole_groups(layer, columns, group)
        checkpoint.check(f"{layer}.qweight", (columns, words), "int32")
        checkpoint.check(f"{layer}.qzeros", (columns // size, words), "int32")
        checkpoint.check(f"{layer}.scales", (columns // size, words * 8), *FLOATS)
        roles = ("qweight", "qzeros", "scales")
        schemes[layer] = Scheme(format="awq", rows=words * 8, columns=columns, bits=_BITS, group=size, roles=roles)
    return schemes


def _numbers(words: np.ndarray) -> np.ndarray:
    """``uint8[words.shape[0], rows]``."""
    placed = unpack(bytes_of_words(words), _BITS, words.shape[1] * 8).reshape(words.shape[0], -1, 8)
    return placed[..., _PLACES].reshape(words.shape[0], -1)


FORMAT = Format(
    find=_find,
    codes=Component(("qweight",), lambda scheme, tensors: pack(_numbers(tensors["qweight"]).T, _BITS)),
    scales=Component(("scales",), lambda scheme, tensors: tensors["scales"].T),
    zero_points=Component(("qzeros",), lambda scheme, tensors: _numbers(tensors["qzeros"]).T),
)

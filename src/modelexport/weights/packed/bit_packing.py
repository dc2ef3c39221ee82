"""Small unsigned numbers in bytes: the first of a row is in the lowest bits of its first byte."""

from __future__ import annotations

import numpy as np


def unpack(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The first ``count`` numbers of each row of bytes, as uint8; ``bits`` divides 8."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = (packed[..., None] >> shifts) & np.uint8(2**bits - 1)
    return numbers.reshape(*packed.shape[:-1], -1)[..., :count]


def pack(numbers: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of :func:`unpack`; the last byte of a row is filled with zeros."""
    per_byte = 8 // bits
    missing = -numbers.shape[-1] % per_byte
    if missing:
        numbers = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, missing)])
    apart = numbers.astype(np.uint8, copy=False).reshape(*numbers.shape[:-1], -1, per_byte)
    packed = apart[..., 0].copy()
    for index in range(1, per_byte):
        packed |= apart[..., index] << np.uint8(bits * index)
    return packed


def bytes_of_words(words: np.ndarray) -> np.ndarray:
    """Rows of int32 as rows of bytes, the lowest byte of each word first."""
    return np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8)

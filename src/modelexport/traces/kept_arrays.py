"""Copies of the arrays of a run: in memory as long as they are few, in a temporary file beyond that."""

from __future__ import annotations

import weakref
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np

IN_MEMORY = 1 << 28
"""The bytes that are kept in memory."""
_ALWAYS_IN_MEMORY = 1 << 16
"""Arrays of fewer bytes are always kept in memory."""


class KeptArrays:
    """Copies arrays and counts their bytes."""

    def __init__(self) -> None:
        self._bytes = 0
        self._file: IO[bytes] | None = None

    def copy(self, array: Any) -> Any:
        """A copy of an array, which is only read if it is in the file."""
        self._bytes += array.nbytes
        if array.nbytes < _ALWAYS_IN_MEMORY or self._bytes <= IN_MEMORY:
            return array.copy()
        if self._file is None:
            self._file = TemporaryFile()  # noqa: SIM115 - closed with this object; its bytes go with the last array
            weakref.finalize(self, self._file.close)
        place = self._file.seek(0, 2)
        self._file.write(np.ascontiguousarray(array).data)
        self._file.flush()
        return np.memmap(self._file, array.dtype, "r", place, array.shape)

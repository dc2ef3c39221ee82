"""Weights inside a model file, read one at a time; the file stays open while its model is in use."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
import onnx_ir as ir

from modelexport.errors import FileFormatError
from modelexport.files.regular import open_regular

_PLAIN = sys.byteorder == "little"
"""Whether elements in a file are as in memory."""
_BLOCK = 1 << 17


class OpenFile:
    """A file that is mapped into memory while its model is in use, and again if one of its tensors is read later.

    A mapping holds a file descriptor, and a process may have only about a thousand of them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path) as file:
            state = os.fstat(file.fileno())
            self._identity = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
            self._mapped: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @property
    def data(self) -> mmap.mmap:
        """The bytes.

        Raises:
            FileFormatError: The file was replaced after it had been closed.
        """
        if self._mapped is None:
            with open_regular(self.path) as file:
                state = os.fstat(file.fileno())
                if (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns) != self._identity:
                    raise FileFormatError(f"{self.path} has been replaced since it was read: read it again")
                self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._mapped

    def close(self) -> None:
        """Release the file descriptor."""
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            with contextlib.suppress(BufferError):  # the data is being written elsewhere at this moment
                mapped.close()


class EmbeddedTensor(ir.LazyTensor):
    """An initializer that is read from its file on each access."""

    def __init__(self, file: OpenFile, place: range, tensor: ir.TensorProtocol) -> None:
        def read() -> ir.TensorProtocol:
            raw = file.data[place.start : place.stop]
            kind = tensor.dtype.numpy()
            if kind.isbuiltin == 1 and len(raw) == tensor.nbytes and _PLAIN:
                array = np.frombuffer(raw, dtype=kind).reshape(shape.numpy())
                return ir.Tensor(array, dtype=tensor.dtype, name=tensor.name)
            proto = onnx.TensorProto(name=tensor.name or "", data_type=tensor.dtype, dims=shape.numpy(), raw_data=raw)
            return ir.serde.deserialize_tensor(proto)

        shape = ir.Shape(tensor.shape.numpy())
        super().__init__(
            read,
            tensor.dtype,
            shape,
            name=tensor.name,
            doc_string=tensor.doc_string,
            metadata_props=dict(tensor.metadata_props),
        )
        self.place = place
        """The bytes in the file."""
        self._file = file

    def holds(self, array: np.ndarray[Any, Any]) -> bool:
        """Whether these are, bit for bit, the elements of an array; the file is read without a copy."""
        facts = self.dtype.numpy(), tuple(self.shape.numpy()), len(self.place)
        if (array.dtype, array.shape, array.nbytes) != facts or not array.flags.c_contiguous or not _PLAIN:
            return False
        here = np.frombuffer(self._file.data, np.uint8, len(self.place), self.place.start)
        own = array.reshape(-1).view(np.uint8)
        return all(
            np.array_equal(here[begin : begin + _BLOCK], own[begin : begin + _BLOCK])
            for begin in range(0, own.size, _BLOCK)
        )

    def tofile(self, file: BinaryIO) -> None:
        with memoryview(self._file.data) as view:
            file.write(view[self.place.start : self.place.stop])

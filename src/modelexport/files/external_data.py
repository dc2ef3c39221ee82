"""Files that hold weights beside a model: where they may be, and whether they are those that were written with it."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import onnx_ir as ir

from modelexport.errors import FileFormatError, WeightsError
from modelexport.files.regular_files import open_regular
from modelexport.files.safetensors_files import read_header
from modelexport.format.documents import DataFile, WeightsFile

_TAIL = hashlib.sha256().digest_size
"""Bytes at the end of a data file: the SHA-256 of everything before them."""
_SAMPLES, _SAMPLE = 256, 64
"""How many samples of a linked file are compared, and the bytes of one."""
WAY_OUT = "put a copy of the right file there, or export again"


class ExternalDataFile:
    """One file that holds weights of a model; checked before it is first read, and again when it has changed."""

    def __init__(self, folder: Path, location: str, linked: WeightsFile | None, written: DataFile | None) -> None:
        self.path = folder / location
        self._folder, self._location = folder, location
        self.linked, self.written = linked, written
        """What the model recorded of it: as a file that it was linked to, or that was written with it."""
        self._spans: set[tuple[int, int]] = set()
        """Begin and end of each tensor that the model reads from it."""
        self._checked: tuple[int, ...] | None = None

    def add(self, tensor: ir.ExternalTensor) -> None:
        """Register a tensor in the file."""
        begin, size = tensor.offset or 0, tensor.nbytes
        if begin < 0 or tensor.length not in (None, size):
            raise FileFormatError(
                f"{self.path}: the place of {tensor.name!r} is damaged: {tensor.length} bytes from byte {begin} for a "
                f"tensor of {size:,} bytes"
            )
        self._spans.add((begin, begin + size))

    def fault(self) -> str:
        """What is wrong with the file, in a sentence; empty if it may be read."""
        if place := self.outside():
            return place
        try:
            state = self.path.stat()
        except OSError:
            return f"{self.path}, which holds weights, is missing"
        signature = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
        if signature == self._checked:
            return ""
        fault = self._content(state)
        self._checked = None if fault else signature
        return fault

    def check(self) -> None:
        """Fail before a byte is read."""
        if fault := self.fault():
            raise FileFormatError(f"{fault}: {WAY_OUT}")

    def outside(self) -> str:
        """Why a file at this place may not be read, judged by its name alone; empty if it may."""
        inside = Path(os.path.normpath(self._location))
        first = inside.parts[:1]
        if not self._location or "\0" in self._location or inside.is_absolute() or first in ((), (os.pardir,)):
            return f"{self._folder}: the model keeps weights in {self._location!r}, which is not a file in its folder"
        if not Path(os.path.realpath(self.path)).is_relative_to(os.path.realpath(self._folder)):
            return f"{self.path}, which should hold weights, points out of the model's folder"
        return ""

    def _content(self, state: os.stat_result) -> str:
        if not stat.S_ISREG(state.st_mode):
            return f"{self.path}, which should hold weights, is not a regular file"
        size, end = state.st_size, max((end for _, end in self._spans), default=0)
        recorded = self.linked or self.written
        if recorded is not None and size != recorded.size:
            return f"{self.path} was changed after the export: it has {size:,} bytes and had {recorded.size:,}"
        if size < end:
            return f"{self.path} is cut off: it has {size:,} bytes and the model's weights end at {end:,}"
        if self.linked is not None:
            return self._linked_fault(self.linked)
        fault = ""
        if self.written is not None:
            with open_regular(self.path) as file:
                file.seek(-min(_TAIL, size), os.SEEK_END)
                if file.read().hex() != self.written.sha256:
                    fault = "does not belong to the model beside it: they are from different runs"
        elif state.st_nlink > 1:
            fault = "holds weights and has another name as well (a hard link), and the model was not linked to it"
        return f"{self.path} {fault}" if fault else ""

    def _linked_fault(self, recorded: WeightsFile) -> str:
        """How the file differs from the safetensors file that the model was linked to."""
        try:
            file = read_header(self.path)
        except WeightsError:
            file = None
        if file is None or file.header != recorded.header:
            return f"{self.path} was changed after the export: its header differs"
        if recorded.sample and sample_digest(self.path) != recorded.sample:
            return f"{self.path} was changed after the export: it has other weights"
        if self._spans - {(place.offset, place.offset + place.length) for place in file.tensors.values()}:
            return f"{self.path} has no tensors at the offsets that the model records for its weights"
        return ""


def sample_digest(path: Path) -> str:
    """SHA-256 of the bytes at places evenly spaced over a file: tells checkpoints of one model apart in milliseconds.

    Raises:
        FileFormatError: It cannot be read.
    """
    digest = hashlib.sha256()
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        for number in range(_SAMPLES):
            file.seek((size - _SAMPLE) * number // (_SAMPLES - 1) if size > _SAMPLE else 0)
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()

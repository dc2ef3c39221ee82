"""Safetensors files and checkpoints: reading, checking and writing headers without the weights.

The format: eight bytes, the length of the header; the header, a JSON object of name to ``dtype``, ``shape`` and
``data_offsets``; the bytes of all tensors, to which the offsets refer
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir
from safetensors import SafetensorError, safe_open

from modelexport.core.json_decoding import decode_json
from modelexport.core.limits import LONGEST_HEADER, SETTINGS_BYTES
from modelexport.core.text import first_few
from modelexport.errors import FileFormatError, WeightsError
from modelexport.files.regular_files import open_regular, read_regular
from modelexport.format.dtypes import SAFETENSORS_NAMES, parse_dtype, parse_safetensors_dtype

_PICKLED = (b"PK\x03\x04", b"\x80\x02")
"""The first bytes of what torch.save writes: a zip archive, or before PyTorch 1.6 a pickle."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The names of a checkpoint's files: one file, or an index that lists several."""


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """The place of a tensor's bytes, with its type and shape."""

    path: Path
    """The path of the file, with symbolic links resolved."""
    offset: int
    length: int
    dtype: ir.DataType
    shape: tuple[int, ...]

    def tensor(self, name: str) -> ir.ExternalTensor:
        """The tensor, which is read when it is used."""
        # Without a folder onnx_ir reads any file, even one with several hard links.
        shape = ir.Shape(self.shape)
        return ir.ExternalTensor(str(self.path), self.offset, self.length, self.dtype, shape=shape, name=name)


@dataclass(frozen=True)
class SafetensorsFile:
    """One file: its size, the SHA-256 of its header, and its tensors by name."""

    path: Path
    """The path as given; it may be a symbolic link, as in the Hub's cache."""
    size: int
    header: str
    tensors: Mapping[str, TensorLocation]


class _Index(msgspec.Struct, frozen=True):
    """The file that lists the files of a checkpoint."""

    weight_map: dict[str, str]


def checkpoint(directory: Path) -> list[SafetensorsFile] | None:
    """The safetensors files of a checkpoint; ``None`` if it has none.

    Raises:
        WeightsError: A file is missing, truncated or not a safetensors file, or the index names a tensor that its file
            does not have.
    """
    index = directory / INDEX
    if (directory / SINGLE).exists():
        return [read_header(directory / SINGLE)]
    if not index.is_file():
        return None
    try:
        places = decode_json(read_regular(index, SETTINGS_BYTES), kind=_Index).weight_map
        names = sorted(set(places.values()))
    except (ValueError, FileFormatError) as error:
        raise WeightsError(
            f"{index} is not an index of safetensors files ({error}): copy or download it again"
        ) from error
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise WeightsError(f"{index} names {outside[0]}, which is not a file beside it: copy or download it again")
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise WeightsError(
            f"{directory} lacks {first_few(missing, 3)}, which {INDEX} names: copy or download it", missing=missing
        )
    files = {name: read_header(directory / name) for name in names}
    if lost := [key for key, name in places.items() if key not in files[name].tensors]:
        raise WeightsError(
            f"{index} names {len(lost)} tensors that their files do not have ({first_few(lost, 3)}; the first "
            f"{places[lost[0]]}): copy or download the files again",
            missing=lost,
        )
    return list(files.values())


def read_header(path: Path) -> SafetensorsFile:
    """The header of a safetensors file; symbolic links are followed.

    The safetensors library itself validates it, and refuses overlapping tensors, gaps between tensors, duplicate names
    and files of another size.
    """
    real, tensors, header = Path(os.path.realpath(path)), dict[str, TensorLocation](), b""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            header = file.read(8)
            header += file.read(min(int.from_bytes(header, "little"), LONGEST_HEADER))
        with safe_open(path, framework="numpy") as checked:
            offset = len(header)
            for name in checked.offset_keys():
                entry = checked.get_slice(name)
                dtype, shape = parse_safetensors_dtype(entry.get_dtype()), tuple(entry.get_shape())
                length = int(prod(shape) * dtype.itemsize)
                tensors[name] = TensorLocation(real, offset, length, dtype, shape)
                offset += length
    except (OSError, FileFormatError) as error:
        raise WeightsError(f"{getattr(error, 'strerror', None) or error}: copy or download {path} again") from error
    except (SafetensorError, ValueError, LookupError) as error:
        if header.startswith(_PICKLED):
            raise WeightsError(
                f"{path} was written by torch.save: load it with torch.load, and write it with "
                "safetensors.torch.save_file"
            ) from error
        raise WeightsError(
            f"{path} is cut off or not a safetensors file ({error}): copy or download it again"
        ) from error
    return SafetensorsFile(path, size, hashlib.sha256(header).hexdigest(), tensors)


@contextlib.contextmanager
def errors_of_writing() -> Iterator[None]:
    """Around a function of the safetensors library that writes a file: an error of the system is an ``OSError``."""
    try:
        yield
    except SafetensorError as error:
        if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def encode_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The header of a file that holds these tensors one after the other.

    Args:
        tensors: Name to element type and shape.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + int(parse_dtype(dtype).itemsize * prod(shape))
        entries[name] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text

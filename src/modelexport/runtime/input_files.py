"""Files of inputs: ``.npz``, ``.safetensors``, and JSON that describes arrays."""

from __future__ import annotations

import zipfile
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from modelexport.core.json_decoding import decode_json
from modelexport.core.limits import INPUT_BYTES, RANDOM_ELEMENTS, SETTINGS_BYTES
from modelexport.core.text import reason_of
from modelexport.errors import FileFormatError
from modelexport.files.regular_files import open_regular, read_regular
from modelexport.files.safetensors_files import read_header
from modelexport.format.dtypes import parse_dtype


class _Described(msgspec.Struct):
    """An input in a JSON description: its value, or its type, its shape and a range to draw from."""

    dtype: str = "float32"
    shape: list[int] = []
    range: tuple[float, float] | None = None
    value: Any = None


def read_feeds(path: Path, seed: int) -> dict[str, Any]:
    """Arrays by name from a file."""
    try:
        if path.suffix == ".npz":
            with open_regular(path) as file:
                return _unpacked(file)
        if path.suffix == ".safetensors":
            if (held := sum(place.length for place in read_header(path).tensors.values())) > INPUT_BYTES:
                raise ValueError(f"it holds {held:,} bytes, and at most {INPUT_BYTES:,} are read")
            from safetensors.numpy import load_file

            return dict(load_file(path))
        described = decode_json(read_regular(path, SETTINGS_BYTES), kind=dict[str, _Described])
        random = np.random.default_rng(seed)
        return {name: _described_array(description, random) for name, description in described.items()}
    except FileFormatError:
        raise
    except Exception as error:  # what a damaged archive or a strange description raises is of many types
        raise FileFormatError(
            f"cannot read inputs from {path} ({reason_of(error)}): give .npz, .safetensors or JSON"
        ) from error


def _unpacked(file: BinaryIO) -> dict[str, Any]:
    with zipfile.ZipFile(file) as archive:
        held = sum(member.file_size for member in archive.infolist())
    if held > INPUT_BYTES:
        raise ValueError(f"it holds {held:,} bytes, and at most {INPUT_BYTES:,} are read")
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


def _described_array(described: _Described, random: np.random.Generator) -> Any:
    dtype = np.dtype(described.dtype)
    kind = "f" if dtype.kind == "V" and parse_dtype(described.dtype).is_floating_point() else dtype.kind  # bfloat16
    if kind not in "iufb":
        raise ValueError(f"{described.dtype} is not a type of numbers")
    if described.value is not None:
        array = np.asarray(described.value, dtype=dtype)
        if kind != "f" and not np.array_equal(array, np.asarray(described.value)):
            raise ValueError(f"{described.dtype} does not hold these numbers")
        return array
    if prod(described.shape) > RANDOM_ELEMENTS or any(size < 0 for size in described.shape):
        raise ValueError(f"the shape {described.shape} is too large, or negative")
    if kind in "iu":
        low, high = described.range or (0, 2)
        return random.integers(int(low), int(high), described.shape, dtype=dtype)
    if kind == "b":
        return np.ones(described.shape, dtype=dtype)
    low, high = described.range or (-1.0, 1.0)
    return random.uniform(low, high, described.shape).astype(dtype)

"""Element types: their names in PyTorch, NumPy, ONNX and safetensors, in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

LARGEST_FLOAT16 = 65504.0
SAFETENSORS_NAMES = {
    "float64": "F64",
    "complex64": "C64",
    "int64": "I64",
    "uint64": "U64",
    "float32": "F32",
    "int32": "I32",
    "uint32": "U32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int16": "I16",
    "uint16": "U16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""PyTorch's and NumPy's name of each type that safetensors files may contain, widest first."""

_NAMES = {name: known for known, name in SAFETENSORS_NAMES.items()}


def dtype_name(dtype: ir.DataType) -> str:
    """PyTorch's and NumPy's name of an element type: ``FLOAT`` is ``float32``, ``FLOAT8E5M2`` is ``float8_e5m2``."""
    return dtype.name.lower() if dtype.name in ("UNDEFINED", "STRING") else dtype.numpy().name


def bit_width(dtype: ir.DataType | None) -> int:
    """Bits of an element; 0 where it has no fixed size, as a text, or no type is known."""
    return 0 if dtype is None or dtype.name in ("UNDEFINED", "STRING") else dtype.bitwidth


def parse_dtype(name: str) -> ir.DataType:
    """The element type with this name.

    Raises:
        ValueError: No element type of ONNX has this name.
    """
    import onnx_ir as ir

    for dtype in ir.DataType:
        if name == dtype_name(dtype):
            return dtype
    raise ValueError(f"unknown element type '{name}'")


def parse_safetensors_dtype(name: str) -> ir.DataType:
    """The element type with this name in safetensors files.

    Raises:
        KeyError: ONNX has no such type.
    """
    return parse_dtype(_NAMES[name])

"""Element types and what others call them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir


def dtype_name(dtype: ir.DataType) -> str:
    """PyTorch's and NumPy's word for an element type, where they have one: ``FLOAT`` is ``float32``."""
    return _DTYPE_NAMES.get(dtype.name, dtype.name.lower())


_DTYPE_NAMES = {"FLOAT": "float32", "DOUBLE": "float64"}

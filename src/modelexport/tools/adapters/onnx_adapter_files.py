"""``.onnx_adapter`` files: values of optional inputs, which ONNX Runtime gives to a session by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime

from modelexport.errors import NotWrittenError

ADAPTER_SUFFIX = ".onnx_adapter"
_VERSION = 1


def write_adapter_file(values: Mapping[str, np.ndarray], path: Path) -> int:
    """Write values of inputs, by name, as a file for ``onnxruntime.LoraAdapter``; returns its bytes."""
    file = onnxruntime.AdapterFormat()
    file.set_adapter_version(_VERSION)
    file.set_model_version(_VERSION)
    parameters = {name: _value(np.ascontiguousarray(array)) for name, array in values.items()}
    file.set_parameters(parameters)
    try:
        file.export_adapter(str(path))
    except RuntimeError as error:
        raise NotWrittenError(f"{path} cannot be written: {error}") from error
    del parameters  # until now: the file has views of the arrays that they hold
    return path.stat().st_size


def _value(array: np.ndarray) -> onnxruntime.OrtValue:
    if array.dtype.isbuiltin == 1:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    dtype = ir.DataType.from_numpy(array.dtype)  # bfloat16, which NumPy does not know
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, dtype.value)

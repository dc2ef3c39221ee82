"""Arrays, of any of ONNX's types, as tensors of torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from modelexport.tools.to_torch.expressions import TORCH_TYPES


def as_tensor(array: np.ndarray[Any, Any]) -> Any:
    """An array, of any of ONNX's types, as a tensor of torch."""
    name = array.dtype.name
    if name in TORCH_TYPES:
        array = array.astype(np.dtype(TORCH_TYPES[name]))
    elif name == "bfloat16" or name.startswith("float8"):
        bits = torch.from_numpy(
            np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").astype(f"i{array.dtype.itemsize}")
        )
        return bits.view(getattr(torch, name)).clone()
    return torch.from_numpy(np.array(array))

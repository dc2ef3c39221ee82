"""Compares a file in ONNX Runtime with PyTorch using only NumPy, without the project's own comparison."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)


def wrong(path: Path, model: nn.Module, inputs: Sequence[Any] | Mapping[str, Any]) -> str:
    """What is wrong with a file; empty if it is valid, loads, and computes what the model does."""
    onnx.checker.check_model(str(path), full_check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    feeds = dict(zip(names, (tensor.numpy() for tensor in tensors(inputs)), strict=True))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of some losses about their own defaults
        returned = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
        expected = [tensor.numpy() for tensor in tensors(returned)]
    actual = session.run(None, feeds)
    if len(expected) != len(actual):
        return f"{len(expected)} outputs, and the file has {len(actual)}"
    for right, other in zip(expected, actual, strict=True):
        if right.shape != other.shape or right.dtype != other.dtype:
            return f"{right.dtype}{right.shape}, and the file gives {other.dtype}{other.shape}"
        scale = max(1.0, float(np.abs(right).max(initial=0)))
        if not np.allclose(right, other, rtol=1e-3, atol=1e-4 * scale, equal_nan=True):
            return f"differs by {np.abs(right.astype(float) - other).max()}"
    return ""

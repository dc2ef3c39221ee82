"""Binding initializers to their tensors: the one place that assigns ``const_value``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir


def bind_tensors(tensors: Mapping[ir.Value, ir.TensorProtocol]) -> None:
    """Let each of these values have its tensor, in place."""
    for value, tensor in tensors.items():
        value.const_value = tensor


def detach_tensors(values: Iterable[ir.Value]) -> dict[ir.Value, ir.TensorProtocol]:
    """Take the tensors off initializers, in place; these stay initializers, whose elements no pass can read.

    Returns:
        The tensors, for :func:`bind_tensors`.
    """
    tensors = {value: value.const_value for value in values if value.const_value is not None}
    for value in tensors:
        value.const_value = None
    return tensors

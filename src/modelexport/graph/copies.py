"""Copies of graphs that others wrote, which may not be graphs."""

from __future__ import annotations

from typing import Any, TypeVar, overload

import onnx_ir as ir

from modelexport.errors import FileFormatError

Copied = TypeVar("Copied", ir.Model, ir.Graph, ir.Function)


@overload
def copy_of(original: Copied) -> Copied: ...
@overload
def copy_of(original: ir.GraphView) -> ir.Graph: ...
def copy_of(original: Any) -> Any:
    """A copy that shares the tensors.

    Raises:
        FileFormatError: A node uses a value before it is made, or two make the same.
    """
    try:
        return original.clone()
    except (RuntimeError, ValueError, LookupError) as error:
        raise FileFormatError(
            "the model is damaged: a node uses a value before it is made, or two nodes make the same one"
        ) from error

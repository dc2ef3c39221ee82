"""Local functions, replaced by their bodies."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.core.text import root_cause
from modelexport.errors import FileFormatError


def inline_calls(model: ir.Model, *, domain: str | None = None, name: str = "the model") -> None:
    """Put the bodies of functions in the place of the nodes that call them, in place.

    Args:
        domain: Of the functions; by default all.
        name: The model, for messages.
    """
    from onnx_ir.passes.common import InlinePass  # takes longer than reading most files

    try:
        InlinePass(None if domain is None else lambda function: function.domain == domain)(model)
    except (ValueError, LookupError, RuntimeError) as error:  # passes raise RuntimeError
        raise FileFormatError(f"the functions of {name} cannot be inlined: {root_cause(error)[:300]}") from error

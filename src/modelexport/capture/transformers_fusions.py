"""transformers' fusions for ONNX Runtime, on any graph."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.core.collected_messages import collected
from modelexport.core.text import error_line
from modelexport.errors import UsageError, raised_as


def apply_fusions(model: ir.Model, provider: str) -> None:
    """Fuse nodes into operators of ONNX Runtime's own, in place.

    Args:
        provider: ``cpu`` or ``cuda``.

    Raises:
        UsageError: The fusions do not take the graph.
    """
    from transformers.exporters.onnxruntime_fusions import fuse_for_onnxruntime

    told = f"the graph cannot be fused for ort-{provider}"
    with collected(), raised_as(lambda error: UsageError(f"{told}: {error_line(error)}; leave out --fuse")):
        fuse_for_onnxruntime(model, provider)

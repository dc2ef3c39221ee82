"""transformers' fusions for ONNX Runtime, on any graph."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.core.messages import collected
from modelexport.errors import UsageError


def apply_fusions(model: ir.Model, provider: str) -> None:
    """Fuse nodes into operators of ONNX Runtime's own, in place.

    Args:
        provider: ``cpu`` or ``cuda``.

    Raises:
        UsageError: The fusions do not take the graph.
    """
    from transformers.exporters.onnxruntime_fusions import fuse_for_onnxruntime

    failure: Exception | None = None
    with collected():
        try:
            fuse_for_onnxruntime(model, provider)
        except Exception as error:  # rewrites of others, on any graph
            failure = error
    if failure is not None:
        reason = " ".join(f"{type(failure).__name__}: {failure}".split())[:240]
        raise UsageError(f"the graph cannot be fused for ort-{provider}: {reason}; leave out --fuse") from failure

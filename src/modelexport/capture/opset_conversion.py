"""Conversion of a captured graph to an older opset than the exporter writes, keeping its owners.

``torch.onnx`` writes opsets from 18 on. For older ones it converts the graph with ONNX's C++ code, which drops the
metadata of nodes, and which silently leaves the graph unchanged if it cannot convert an operator. This module converts
the graph after its owners are known, and finds them again by the names of values. A result whose opset is not the
requested one is an error.
"""

from __future__ import annotations

import logging

import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnxscript import version_converter

from modelexport.core.collected_messages import collected
from modelexport.errors import CaptureError
from modelexport.graph.snapshot import take_snapshot
from modelexport.graph.unique_names import with_unique_names
from modelexport.lineage.owners_after_passes import derive_owners

OLDEST_TRANSLATED = 18
"""The oldest opset that ``torch.onnx`` has translations for."""


def translated_opset(opset: int | None) -> int | None:
    """The opset to request from ``torch.onnx`` when the graph should get this one."""
    return opset if opset is None else max(opset, OLDEST_TRANSLATED)


def convert_to_opset(model: ir.Model, opset: int) -> ir.Model:
    """Convert an inlined graph with owners to an older opset; its values keep their names.

    Raises:
        CaptureError: ONNX cannot convert one of the graph's operators.
    """
    if model.opset_imports.get("") == opset:
        return model
    with_unique_names(model, {})
    source = take_snapshot(model)
    reasons = _Reasons()
    logger = logging.getLogger(version_converter.__name__)
    logger.addFilter(reasons)
    try:
        with collected():
            version_converter.ConvertVersionPass(opset, fallback=True)(model)
    finally:
        logger.removeFilter(reasons)
    if model.opset_imports.get("") != opset:
        before = model.opset_imports.get("")
        reason = f"ONNX cannot convert this graph from opset {before} to opset {opset}{reasons.last}"
        raise CaptureError(
            f"{reason}; choose opset {OLDEST_TRANSLATED} or later, or the front end torchscript", reason=reason
        )
    passes.ShapeInferencePass()(model)
    derive_owners(source, model)
    return model


class _Reasons(logging.Filter):
    """Records why the converter failed: it only logs the reason."""

    def __init__(self) -> None:
        super().__init__()
        self.last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            text = str(error).strip().splitlines()
            self.last = f": {text[-1].strip()}" if text else ""
        return False

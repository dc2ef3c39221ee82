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


def convert_to_opset(model: ir.Model, opset: int) -> None:
    """Convert an inlined graph with owners to an older opset, in place; its values keep their names."""
    if model.opset_imports.get("") == opset:
        return
    with_unique_names(model, {})
    source = take_snapshot(model)
    why = ""

    def note(record: logging.LogRecord) -> bool:
        """Keep the reason of a failure, which the converter only logs."""
        nonlocal why
        error = record.exc_info[1] if record.exc_info else None
        why = next((f": {line.strip()}" for line in reversed(str(error or "").strip().splitlines())), why)
        return False

    logger = logging.getLogger(version_converter.__name__)
    logger.addFilter(note)
    try:
        with collected():
            version_converter.ConvertVersionPass(opset, fallback=True)(model)
    finally:
        logger.removeFilter(note)
    if model.opset_imports.get("") != opset:
        reason = f"ONNX cannot convert this graph from opset {model.opset_imports.get('')} to opset {opset}{why}"
        raise CaptureError(
            f"{reason}; choose opset {OLDEST_TRANSLATED} or later, or the front end torchscript", reason=reason
        )
    passes.ShapeInferencePass()(model)
    derive_owners(source, model)

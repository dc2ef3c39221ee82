"""A captured graph in an older opset than the exporter writes, its owners kept.

``torch.onnx`` writes opsets from 18 on. Below, it converts through ONNX's C++ code, which drops whatever is known of
a node, and leaves the graph as it was, without a word, where that code has no way down. Here the graph is converted
after its owners are known, and they are found again by the names of its values. A graph that comes out with another
opset than the one that was asked for is an error.
"""

from __future__ import annotations

import logging

import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnxscript import version_converter

from modelexport.core.messages import collected
from modelexport.errors import CaptureError
from modelexport.graph.names import with_unique_names
from modelexport.graph.snapshot import take_snapshot
from modelexport.lineage.derivation import derive_owners

OLDEST_TRANSLATED = 18
"""The oldest opset that ``torch.onnx`` has translations for."""


def translated_opset(opset: int | None) -> int | None:
    """The opset to ask ``torch.onnx`` for, where a graph is wanted in this one."""
    return opset if opset is None else max(opset, OLDEST_TRANSLATED)


def convert_to_opset(model: ir.Model, opset: int) -> ir.Model:
    """Convert an inlined graph with owners to an older opset; its values keep their names.

    Raises:
        CaptureError: ONNX has no way there for one of its operators.
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
        reason = f"ONNX converts this graph from opset {before} to no opset {opset}{reasons.last}"
        raise CaptureError(
            f"{reason}; ask for opset {OLDEST_TRANSLATED} or later, or for the front end torchscript",
            reason=reason,
        )
    passes.ShapeInferencePass()(model)
    derive_owners(source, model)
    return model


class _Reasons(logging.Filter):
    """Takes down why the converter gave up: it only logs that."""

    def __init__(self) -> None:
        super().__init__()
        self.last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            text = str(error).strip().splitlines()
            self.last = f": {text[-1].strip()}" if text else ""
        return False

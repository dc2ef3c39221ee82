"""Converts a file with operators of an old version to the version that quantizers need; owners and names stay."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.core.collected_messages import collected
from modelexport.errors import UsageError
from modelexport.files.path_or_model import Source
from modelexport.graph.snapshot import take_snapshot
from modelexport.graph.unique_names import name_nodes_apart
from modelexport.lineage.owners_after_passes import derive_owners
from modelexport.tagged.file import TaggedFile, read_tagged

QUANTIZED_SINCE = 11
"""The oldest version of the standard operators that ONNX Runtime's quantizers take."""


def read_to_quantize(file: Source) -> TaggedFile:
    """The file, with operators that the quantizers take.

    Raises:
        FileFormatError: It is missing or not an ONNX file.
        UsageError: ONNX cannot convert one of its operators.
    """
    tagged = read_tagged(file)
    raise_version(tagged.model)
    return tagged


def raise_version(model: ir.Model) -> None:
    """Convert a model whose standard operators are older than the quantizers take, in place.

    Raises:
        UsageError: ONNX cannot convert one of its operators.
    """
    version = model.opset_imports.get("", QUANTIZED_SINCE)
    if version >= QUANTIZED_SINCE:
        return
    from onnxscript import version_converter  # takes longer than everything else here

    source = take_snapshot(model)
    with collected():
        version_converter.ConvertVersionPass(QUANTIZED_SINCE, fallback=True)(model)
    if model.opset_imports.get("") != QUANTIZED_SINCE:
        raise UsageError(
            f"quantization needs version {QUANTIZED_SINCE} of ONNX's operators, and the file has {version}, which "
            "onnx cannot convert"
        )
    name_nodes_apart(model)
    derive_owners(source, model)

"""Checking that a document beside a model was written together with it, by the digests in the model."""

from __future__ import annotations

import hashlib
from pathlib import Path

import onnx_ir as ir

from modelexport.core.limits import DOCUMENT_BYTES
from modelexport.errors import FileFormatError
from modelexport.files.regular_files import read_regular
from modelexport.format import keys
from modelexport.graph.properties import recorded


def check_document(path: Path, model: ir.Model, suffix: str) -> None:
    """Refuse a document beside a model that was not written together with it, if there is one.

    A killed run, or copying only some of the files, may leave files of two exports beside each other.

    Args:
        path: Where the model is.
        model: The model. One of an earlier version has no digests.
        suffix: The suffix of the document.
    """
    digests = recorded(model, keys.DOCUMENTS, damaged=f"{path} has damaged tags")
    document = path.with_suffix(suffix)
    if digests is None or not document.exists():
        return
    if hashlib.sha256(read_document(document)).hexdigest() != digests.get(suffix):
        raise FileFormatError(
            f"{document} does not belong to {path}: they are from different runs, or one was changed; export "
            "again, or remove the document: the model can be read without it"
        )


def read_document(path: Path) -> bytes:
    """The bytes of a document."""
    if not path.exists():
        raise FileFormatError(f"cannot read {path}: there is no such file")
    return read_regular(path, DOCUMENT_BYTES)

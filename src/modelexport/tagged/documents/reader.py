"""Reading the JSON documents beside a model into their types."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from modelexport.core.json_decoding import decode_json
from modelexport.files.document_digests import check_document, read_document
from modelexport.files.linked_weights import check_present_weights_files
from modelexport.files.onnx_models import load_onnx
from modelexport.format import documents, keys
from modelexport.format.versions import FORMAT_VERSION, unknown_version

T = TypeVar("T")


def load_hierarchy(path: str | Path) -> documents.Hierarchy:
    """Read a sidecar, ``NAME.hierarchy.json``.

    Raises:
        FileFormatError: It is missing, is another document, or has an unknown format version.
    """
    path = Path(path)
    content = read_document(path)
    version = _decode(path, content, _Versioned).format_version
    if version != FORMAT_VERSION:
        raise unknown_version(path, version)
    return _decode(path, content, documents.Hierarchy)


def load_dag(path: str | Path, *, checked: bool = True) -> dict[str, documents.Dag]:
    """Read ``NAME.dag.json``: tag to operations and edges.

    Args:
        checked: Refuse a document that was not written with the model beside it.

    Raises:
        FileFormatError: It is missing, is another document, or does not belong to the model beside it.
    """
    return _decode(Path(path), _content(Path(path), checked), dict[str, documents.Dag])


def load_operations(path: str | Path, *, checked: bool = True) -> dict[str, documents.Operation]:
    """Read ``NAME.operations.json``: the name of a node or an initializer to its entry.

    Args, Raises:
        As :func:`load_dag`.
    """
    return _decode(Path(path), _content(Path(path), checked), dict[str, documents.Operation])


class _Versioned(msgspec.Struct):
    format_version: str


def _content(path: Path, checked: bool) -> bytes:
    """The content of a document without a version of its own."""
    content = read_document(path)
    suffix = next((end for end in keys.DESCRIBING_SUFFIXES if path.name.endswith(end)), None)
    model = path.with_name(path.name.removesuffix(suffix or "") + ".onnx")
    if checked and suffix is not None and model.is_file():
        beside = load_onnx(model)
        check_present_weights_files(beside)
        check_document(model, beside, suffix)
    return content


def _decode(path: Path, content: bytes, kind: type[T]) -> T:
    return decode_json(content, kind=kind, damaged=f"{path} is damaged or another document")

"""Reading the JSON documents beside a model into their types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

import msgspec
import onnx_ir as ir

from modelexport.core.json_decoding import decode_json
from modelexport.errors import FileFormatError
from modelexport.files.document_digests import check_documents, read_document
from modelexport.files.linked_weights import check_weights
from modelexport.files.onnx_models import load_onnx
from modelexport.format import documents, keys
from modelexport.format.versions import READ_VERSIONS, unknown_version
from modelexport.graph.node_owners import owner_of

T = TypeVar("T")
_MISSING = "missing"


def load_hierarchy(path: str | Path) -> documents.Hierarchy:
    """Read a sidecar, ``NAME.hierarchy.json``.

    Raises:
        FileFormatError: It is missing, is another document, or has an unknown format version.
    """
    path = Path(path)
    content = read_document(path)
    version = _decode(path, content, _Versioned).format_version
    if version not in READ_VERSIONS:
        raise unknown_version(path, version)
    return _decode(path, content, documents.Hierarchy)


def load_dag(path: str | Path, properties: Mapping[str, str] | None = None) -> dict[str, documents.Dag]:
    """Read ``NAME.dag.json``: tag to operations and edges.

    Args:
        properties: Those of the model beside it, if that was read already.

    Raises:
        FileFormatError: It is missing, is another document, or does not belong to the model beside it.
    """
    return _decode(Path(path), _checked(Path(path), properties), dict[str, documents.Dag])


def load_operations(path: str | Path, properties: Mapping[str, str] | None = None) -> dict[str, documents.Operation]:
    """Read ``NAME.operations.json``: the name of a node or an initializer to its entry.

    Args:
        properties: As in :func:`load_dag`.

    Raises:
        FileFormatError: It is missing, is another document, or does not belong to the model beside it.
    """
    return _decode(Path(path), _checked(Path(path), properties), dict[str, documents.Operation])


def check_same_calls(path: Path, sidecar: documents.Hierarchy, calls: Sequence[documents.CallTreeEntry]) -> None:
    """Compare the calls in a model with those in the sidecar beside it.

    Raises:
        FileFormatError: They are not the same. Names the first difference.
    """
    _check_same(
        path,
        "call",
        (f"'{call.address or '.'}' in '{call.parent or '.'}', {call.tag}" for call in sidecar.calls),
        (f"'{call.call or '.'}' in '{call.parent or '.'}', {call.tag}" for call in calls),
    )


def check_same_nodes(path: Path, sidecar: documents.Hierarchy, nodes: Sequence[ir.Node]) -> None:
    """Compare the nodes of a model and their owners with those in the sidecar beside it, in any order.

    Raises:
        FileFormatError: They are not the same. Names the first difference.
    """
    facts = {}
    for node in nodes:
        owner = owner_of(node)
        facts[node.name or ""] = f"{node.op_type} of {owner.call if owner else 'no call'}"
    listed = {node.name: f"{node.op_type} of {node.call or '.'}" for node in sidecar.nodes}
    order = dict.fromkeys([*listed, *facts])
    _check_same(
        path,
        "node",
        (f"'{name}' ({listed[name]})" if name in listed else _MISSING for name in order),
        (f"'{name}' ({facts[name]})" if name in facts else _MISSING for name in order),
    )


def _check_same(path: Path, kind: str, there: Iterable[str], here: Iterable[str]) -> None:
    for its, own in zip_longest(there, here, fillvalue=_MISSING):
        if its != own:
            raise FileFormatError(
                f"{path} contradicts the model beside it: {kind} {its} in the document is {own} in the model; export "
                "again, or remove the document: the model can be read without it"
            )


class _Versioned(msgspec.Struct):
    format_version: str


def _checked(path: Path, properties: Mapping[str, str] | None) -> bytes:
    """The content of a document without a version of its own, checked against the model beside it."""
    content = read_document(path)
    suffix = next((end for end in keys.DESCRIBING_SUFFIXES if path.name.endswith(end)), None)
    model = path.with_name(path.name.removesuffix(suffix or "") + ".onnx")
    if suffix is not None and model.is_file():
        if properties is None:
            beside = load_onnx(model)
            check_weights(beside)
            properties = beside.metadata_props
        check_documents(model, properties)
    return content


def _decode(path: Path, content: bytes, kind: type[T]) -> T:
    return decode_json(content, kind=kind, damaged=f"{path} is damaged or another document")

"""The tree of a tagged file, read without ``onnx_ir``, whose import takes longer than everything else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx

from modelexport.core.calls import CallTree, ModuleCall
from modelexport.core.owners import Evidence
from modelexport.files.same_export import check_documents
from modelexport.files.serialized import read_serialized, serialized_nodes
from modelexport.files.untrusted import check_functions
from modelexport.files.weights_beside import check_recorded
from modelexport.format import documents, keys
from modelexport.format.call_tree import check_version, read_call_tree
from modelexport.format.node_tags import OwnerReader


@dataclass(frozen=True)
class Skimmed:
    """The data for showing a tree."""

    calls: CallTree
    tags: dict[ModuleCall, str]
    nodes: list[tuple[ModuleCall | None, str]]
    """Every node: the call that produces its output, if known, and its operator."""
    coverage: documents.Coverage


def skim(path: Path, *, checked: bool = True) -> Skimmed | None:
    """Read the tags of a file's nodes; ``None`` for a file that has to be read completely.

    That is a file whose tags are not metadata of nodes, or a damaged file: :func:`modelexport.load` reports the error.

    Args:
        checked: Also check that its weights files, if they exist, are those that were written with it.

    Raises:
        FileFormatError: A document or a weights file beside it belongs to another export.
    """
    properties: dict[str, str] = {}
    try:
        model = read_serialized(path)
        properties = _properties(model)
        check_version(path, properties)
        if keys.ENCODING in properties or keys.FORMER_ENCODING in properties:
            return None
        calls, tags = read_call_tree(properties)
        nodes: list[tuple[ModuleCall | None, str]] = []
        evidence: list[Evidence | None] = []
        owners = OwnerReader(calls)
        check_functions(model)
        for node in serialized_nodes(model):
            owner = owners.read(_properties(node))
            nodes.append((None if owner is None else owner.call, node.op_type))
            evidence.append(None if owner is None else owner.evidence)
    except Exception:  # the full reader raises the error that names the fault
        return None
    check_documents(path, properties)
    if checked:
        check_recorded(path.parent, properties)
    return Skimmed(calls, tags, nodes, documents.Coverage.of(evidence))


def _properties(proto: onnx.ModelProto | onnx.NodeProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in proto.metadata_props}

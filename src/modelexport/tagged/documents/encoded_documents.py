"""The documents beside a model as the bytes of their files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec
import onnx_ir as ir

from modelexport.core.tags import CallTags
from modelexport.format import documents
from modelexport.format.keys import DAG_SUFFIX, OPERATIONS_SUFFIX, SIDECAR_SUFFIX
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import all_nodes
from modelexport.tagged.documents.dag import dag_document
from modelexport.tagged.documents.export_facts import ExportFacts
from modelexport.tagged.documents.hierarchy_sidecar import hierarchy_document
from modelexport.tagged.documents.operations import operations_document

Table: TypeAlias = Callable[[ir.Model, CallTags], Mapping[str, msgspec.Struct]]
TABLES: Mapping[str, Table] = {DAG_SUFFIX: dag_document, OPERATIONS_SUFFIX: operations_document}
"""The documents that follow from the tags of a model alone."""


def encode_table(entries: Mapping[str, msgspec.Struct]) -> bytes:
    """A JSON object in UTF-8 with named entries, one on each line, so that diffs are readable."""
    encode = msgspec.json.Encoder().encode
    lines = [encode(name) + b": " + encode(entry) for name, entry in entries.items()]
    return b"{\n" + b",\n".join(lines) + b"\n}\n"


def encode_sidecar(hierarchy: documents.Hierarchy) -> bytes:
    """The sidecar as JSON."""
    return msgspec.json.format(msgspec.json.encode(hierarchy), indent=1)


def documents_after(
    path: Path, facts: ExportFacts | None, model: ir.Model, tags: CallTags, *, untagged: bool = False
) -> dict[str, bytes]:
    """The documents that are beside a file, made for a model that it became: the end of each name to the content.

    Args:
        path: The file that was changed.
        facts: What is known of the model besides its graph; without it there is no sidecar.
        untagged: Nodes may have no owner. Then the tables, which name every node, are left out.

    Raises:
        FileFormatError: A node has no owner, and none may.
    """
    complete = not untagged or None not in map(owner_of, all_nodes(model))
    tables = {suffix: table for suffix, table in TABLES.items() if complete and path.with_suffix(suffix).is_file()}
    written = {} if facts is None else {SIDECAR_SUFFIX: encode_sidecar(hierarchy_document(facts, model, tags))}
    return written | {suffix: encode_table(table(model, tags)) for suffix, table in tables.items()}

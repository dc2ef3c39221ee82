"""``NAME.dag.json``: the operations of every module call and the edges between them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import onnx_ir as ir

from modelexport.core.calls import CallTree, ModuleCall
from modelexport.core.tags import CallTags
from modelexport.files.atomic_writing import Replacement
from modelexport.files.replaceable_files import check_written_by_us
from modelexport.format import documents
from modelexport.graph.node_owners import required_owner
from modelexport.graph.nodes import all_nodes, nested_graphs

Scope = ir.Graph | ir.Function | None
"""A container of nodes."""

_CONSTANT = ("", "Constant", "")
_LONGEST_NAME = 120
"""The most characters of a tag in a file name: the whole name stays below the 143 of encrypted file systems."""


def dag_document(model: ir.Model, tags: CallTags) -> dict[str, documents.Dag]:
    """The tag of every call to its operations, those of the calls inside it included.

    Graph inputs and outputs, initializers and ``Constant`` nodes are left out. A node with nested graphs (``If``,
    ``Loop``, ``Scan``) represents the nodes in them, with the values that they use from outside. Only a call that ran
    inside such a graph, so that the enclosing node does not belong to it, lists the nested nodes themselves.

    Args:
        model: A model whose nodes have owners and unique names, and whose graphs are sorted.
    """
    dags = {traced.call: documents.Dag([], []) for traced in tags.calls}
    listed, enclosing = _listed(model, tags.calls)
    for node, calls in listed.items():
        if node.op_identifier() != _CONSTANT:
            for call in calls:
                dags[call].nodes.append(node.name or "")
    for producer, consumer in dict.fromkeys(_edges(model, enclosing)):
        users = listed[consumer]
        for call in listed[producer]:
            if call in users:
                dags[call].edges.append((producer.name or "", consumer.name or ""))
    return {tags.tag(call): dag for call, dag in dags.items()}


def _listed(model: ir.Model, calls: CallTree) -> tuple[dict[ir.Node, Mapping[ModuleCall, None]], dict[Scope, ir.Node]]:
    """The calls whose DAG lists each node, in the order of the nodes; and the enclosing node of each nested graph."""
    running: dict[tuple[ModuleCall, ...], dict[ModuleCall, None]] = {}
    listed: dict[ir.Node, Mapping[ModuleCall, None]] = {}
    enclosing: dict[Scope, ir.Node] = {}
    spoken_for: dict[Scope, Mapping[ModuleCall, None]] = {}
    for node in all_nodes(model):
        owner = required_owner(node)
        if owner.calls not in running:
            running[owner.calls] = dict.fromkeys(call for owned in owner.calls for call in calls.stack(owned))
        inside = running[owner.calls]
        hidden = spoken_for.get(node.graph)
        listed[node] = inside if hidden is None else {call: None for call in inside if call not in hidden}
        for graph in nested_graphs(node):
            enclosing[graph] = node
            spoken_for[graph] = inside if hidden is None else {**hidden, **inside}
    return listed, enclosing


def _edges(model: ir.Model, enclosing: Mapping[Scope, ir.Node]) -> Iterator[tuple[ir.Node, ir.Node]]:
    """Producer and consumer of every value, in the order of the consumers. Enclosing nodes are consumers as well."""
    for node in all_nodes(model):
        for value in node.inputs:
            producer = value.producer() if value is not None else None
            if producer is None or producer.op_identifier() == _CONSTANT:
                continue
            consumer = node
            yield producer, consumer
            while consumer.graph is not producer.graph:
                consumer = enclosing[consumer.graph]
                yield producer, consumer


def write_dag_files(replacement: Replacement, directory: Path, dags: Mapping[str, documents.Dag]) -> None:
    """Write each entry of ``NAME.dag.json`` into a separate file, to be moved with the others.

    Raises:
        OutputError: The folder does not exist and cannot be created, or has such a file that somebody else wrote.
    """
    encode = msgspec.json.Encoder().encode
    staging = replacement.folder(directory, make=True)
    for tag, dag in dags.items():
        check_written_by_us(directory / dag_file_name(tag))
        (staging / dag_file_name(tag)).write_bytes(encode(dag) + b"\n")


def dag_file_name(tag: str) -> str:
    """The file name for a tag: ``BertModel-BertLayer.0-<8 hexadecimal digits>.json`` for ``/BertModel/BertLayer.0``.

    The digits are the beginning of the SHA-256 of the tag: they distinguish names that differ only in case, in
    characters that some file systems do not allow, or in the part that is cut off. They also avoid reserved names.
    """
    readable = "-".join(re.sub(r"[^A-Za-z0-9_.@]", "_", segment) for segment in tag[1:].split("/"))
    return f"{readable[-_LONGEST_NAME:]}-{hashlib.sha256(tag.encode()).hexdigest()[:8]}.json"

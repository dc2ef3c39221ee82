"""The tree of a tagged file, read without ``onnx_ir``, whose import takes longer than everything else."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx

from modelexport.core.calls import CallTree, ModuleCall
from modelexport.core.owners import Evidence
from modelexport.files.wire import without_weights
from modelexport.format import documents, keys
from modelexport.format.call_tree import check_version, read_call_tree


@dataclass(frozen=True)
class Skimmed:
    """What a tree shows."""

    calls: CallTree
    tags: dict[ModuleCall, str]
    nodes: list[tuple[ModuleCall | None, str]]
    """Every node: the call that produces its output, where one is known, and its operator."""
    coverage: documents.Coverage


def skim(path: Path) -> Skimmed | None:
    """Read what the nodes of a file say of themselves; ``None`` for a file that has to be read whole to be understood.

    That is one in which the tags are not metadata of nodes, or with which something is wrong: :func:`modelexport.load`
    says what.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            model = onnx.ModelProto.FromString(without_weights(data)[0])
        properties = _properties(model)
        check_version(path, properties)
        if keys.ENCODING in properties or keys.FORMER_ENCODING in properties:
            return None
        calls, tags = read_call_tree(properties)
        nodes: list[tuple[ModuleCall | None, str]] = []
        evidence: Counter[Evidence | None] = Counter()
        for graph in (model.graph, *model.functions):
            for node in _nodes(graph.node):
                said = _properties(node)
                call = ModuleCall.parse(said[keys.CALL]) if keys.CALL in said else None
                nodes.append((call if call is None else calls[call].call, node.op_type))
                evidence[None if call is None else Evidence(said[keys.EVIDENCE])] += 1
    except Exception:  # the full reader raises the error that names the fault
        return None
    return Skimmed(calls, tags, nodes, documents.Coverage(*(evidence[kind] for kind in (*Evidence, None))))


def _properties(proto: onnx.ModelProto | onnx.NodeProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in proto.metadata_props}


def _nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes and those of the graphs that they hold."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _nodes(graph.node)

"""The postcondition of an export: every node has an owner, known by some evidence."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.core.owners import Evidence
from modelexport.errors import UntaggedNodeError
from modelexport.format.documents import Coverage
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import all_nodes


def check_coverage(model: ir.Model) -> Coverage:
    """Count the nodes of the graph, of nested graphs and of functions by the evidence for their owner."""
    coverage, untagged = count_coverage(model)
    if untagged:
        raise UntaggedNodeError(untagged)
    return coverage


def count_coverage(model: ir.Model) -> tuple[Coverage, list[str]]:
    """The number of nodes by the evidence for their owner, and a line for each node without an owner."""
    evidence: list[Evidence | None] = []
    untagged: list[str] = []
    for node in all_nodes(model):
        owner = owner_of(node)
        evidence.append(None if owner is None else owner.evidence)
        if owner is None:
            graph = node.graph.name if node.graph is not None else None
            untagged.append(f"{node.name} ({node.op_type}) in {graph or 'a nested graph'}")
    return Coverage.of(evidence), untagged

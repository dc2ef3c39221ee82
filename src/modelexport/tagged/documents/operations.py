"""``NAME.operations.json``: every operation and every initializer by its name."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.core.tags import CallTags
from modelexport.format import documents
from modelexport.graph.node_owners import required_owner
from modelexport.graph.nodes import all_nodes, initializers
from modelexport.tagged.encodings.metadata import initializer_tags


def operations_document(model: ir.Model, tags: CallTags) -> dict[str, documents.Operation]:
    """The operations, nested ones after their enclosing node, and then the initializers.

    Args:
        model: A model whose nodes have owners and names that are unique among nodes and initializers.
    """
    operations: dict[str, documents.Operation] = {}
    for node in all_nodes(model):
        owner = required_owner(node)
        operations[node.name or ""] = documents.Operation(
            node.op_type,
            ["" if value is None else value.name or "" for value in node.inputs],
            [value.name or "" for value in node.outputs],
            list(dict.fromkeys(map(tags.source_tag, owner.calls))),
        )
    for value in initializers(model):
        name = value.name or ""
        operations[name] = documents.Operation("Initializer", [], [name], initializer_tags(value, tags))
    return operations

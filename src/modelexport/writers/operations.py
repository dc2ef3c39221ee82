"""``NAME.operations.json``: every operation and every initializer by its name."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from modelexport import schema
from modelexport.graph import all_nodes, initializers, owner_of
from modelexport.tags import CallTags
from modelexport.writers.node_tags import initializer_tags


def name_nodes_apart(model: ir.Model) -> None:
    """Give every node a name that no other node and no initializer has, in place.

    The names of nodes are only unique within their graph when the optimiser is done, and nothing keeps a parameter from
    being called what a node is called.
    """
    taken = {value.name for value in initializers(model)}
    repeats: Counter[str] = Counter()
    for node in all_nodes(model):
        name = stem = node.name or node.op_type
        while name in taken:
            repeats[stem] += 1
            name = f"{stem}_{repeats[stem] + 1}"
        taken.add(name)
        node.name = name


def operations_document(model: ir.Model, tags: CallTags) -> dict[str, schema.Operation]:
    """The operations, nested ones after the node that holds them, and then the initializers.

    Args:
        model: Its nodes carry their owners and have names that no other node and no initializer has.
    """
    operations: dict[str, schema.Operation] = {}
    for node in all_nodes(model):
        owner = owner_of(node)
        assert owner is not None, "coverage is checked before anything is written"
        operations[node.name or ""] = schema.Operation(
            node.op_type,
            ["" if value is None else value.name or "" for value in node.inputs],
            [value.name or "" for value in node.outputs],
            list(dict.fromkeys(map(tags.source_tag, owner.calls))),
        )
    for value in initializers(model):
        name = value.name or ""
        operations[name] = schema.Operation("Initializer", [], [name], initializer_tags(value, tags))
    return operations

"""The `metadata` encoding: owners as properties of nodes and initializers."""

from __future__ import annotations

import json

import onnx_ir as ir

from modelexport.core.tags import CallTags
from modelexport.core.version import __version__
from modelexport.format import keys
from modelexport.format.call_tree import call_tree_entries, encode_call_tree
from modelexport.format.node_tags import NODE_KEYS, owner_properties
from modelexport.format.versions import FORMAT_VERSION
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import all_nodes, initializers
from modelexport.graph.properties import HasProperties, drop_texts, put_texts

_TORCH_KEYS = ("pkg.torch.", "pkg.onnxscript.")


def write_tags(model: ir.Model, tags: CallTags) -> None:
    """Write every node's owner and every initializer's users into a model, in place, whatever it had before."""
    for node in all_nodes(model):
        drop_texts([node], NODE_KEYS)
        if (owner := owner_of(node)) is not None:  # exports and `retag` refuse nodes without owners
            put_texts(node, owner_properties(owner, tags))
    write_calls(model, tags)


def write_calls(model: ir.Model, tags: CallTags) -> None:
    """Write the call tree and every initializer's users into a model, in place."""
    for value in initializers(model):
        put_texts(value, {keys.HIERARCHY_TAGS: json.dumps(initializer_tags(value, tags))})
    call_tree = encode_call_tree(call_tree_entries(tags))
    put_texts(
        model, {keys.FORMAT_VERSION_KEY: FORMAT_VERSION, keys.CALL_TREE: call_tree, keys.VERSION_KEY: __version__}
    )


def initializer_tags(value: ir.Value, tags: CallTags) -> list[str]:
    """The tags of every call that uses an initializer, in the order of the nodes."""
    users: dict[str, None] = {}
    for node in value.consumers():
        owner = owner_of(node)
        if owner is not None:
            users.update((tags.source_tag(call), None) for call in owner.calls)
    return list(users)


def drop_foreign_metadata(model: ir.Model) -> None:
    """Remove the keys of torch's exporter and the doc string of every node: both contain paths of the machine.

    The keys take most of a graph file. One of them is among ours as well, so tags are written afterwards.
    """
    elements: list[HasProperties] = [model]
    for graph in model.graphs():
        elements += [graph, *graph.inputs, *graph.outputs, *graph.initializers.values()]
    for node in all_nodes(model):
        node.doc_string = None
        elements += [node, *node.outputs]
    drop_texts(elements, lambda key: key == keys.NAMESPACE or key.startswith(_TORCH_KEYS))

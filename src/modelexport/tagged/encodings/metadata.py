"""The `metadata` encoding: owners as ``metadata_props`` of nodes and initializers."""

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

_TORCH_KEYS = ("pkg.torch.", "pkg.onnxscript.")


def write_metadata(model: ir.Model, tags: CallTags, *, keep_torch_metadata: bool = False) -> None:
    """Write the tags of a model into it, in place."""
    if not keep_torch_metadata:
        drop_torch_metadata(model)
    write_tags(model, tags)


def write_tags(model: ir.Model, tags: CallTags) -> None:
    """Write every node's owner and every initializer's users into a model, in place, whatever it had before."""
    for node in all_nodes(model):
        properties = node.metadata_props
        for key in NODE_KEYS:
            properties.pop(key, None)
        if (owner := owner_of(node)) is not None:  # only an export refuses nodes without owners
            properties.update(owner_properties(owner, tags))
    write_calls(model, tags)


def write_calls(model: ir.Model, tags: CallTags) -> None:
    """Write the call tree and every initializer's users into a model, in place."""
    for value in initializers(model):
        others = {key: text for key, text in value.metadata_props.items() if key != keys.HIERARCHY_TAGS}
        value.metadata_props.clear()
        value.metadata_props.update({keys.HIERARCHY_TAGS: json.dumps(initializer_tags(value, tags))} | others)
    model.metadata_props[keys.FORMAT_VERSION_KEY] = FORMAT_VERSION
    model.metadata_props[keys.CALL_TREE] = encode_call_tree(call_tree_entries(tags))
    model.metadata_props[keys.VERSION_KEY] = __version__


def initializer_tags(value: ir.Value, tags: CallTags) -> list[str]:
    """The tags of every call that uses an initializer, in the order of the nodes."""
    users: dict[str, None] = {}
    for node in value.consumers():
        owner = owner_of(node)
        if owner is not None:
            users.update((tags.source_tag(call), None) for call in owner.calls)
    return list(users)


def drop_torch_metadata(model: ir.Model) -> None:
    """Remove the exporter's own keys, which take most of the graph file and contain paths of the exporting machine.

    Such paths are also in the doc strings that exporters write for nodes, so these are removed, whoever wrote them.
    """
    stores = [model.metadata_props]
    for graph in model.graphs():
        stores.append(graph.metadata_props)
        stores.extend([v.metadata_props for v in (*graph.inputs, *graph.outputs, *graph.initializers.values())])
    for node in all_nodes(model):
        node.doc_string = None
        stores.append(node.metadata_props)
        stores.extend([value.metadata_props for value in node.outputs if value.metadata_props])
    for store in stores:
        for key in [key for key in store if key == keys.NAMESPACE or key.startswith(_TORCH_KEYS)]:
            del store[key]

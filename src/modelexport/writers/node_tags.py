"""The `metadata` carrier: owners as ``metadata_props`` of nodes and initializers."""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec
import onnx_ir as ir

import modelexport
from modelexport import schema
from modelexport.core import Owner
from modelexport.graph import all_nodes, initializers, owner_of
from modelexport.parameters import Origin
from modelexport.tags import CallTags

_TORCH_KEYS = ("pkg.torch.", "pkg.onnxscript.")


def write_metadata(
    model: ir.Model,
    tags: CallTags,
    origins: Mapping[str, Origin],
    entries: Mapping[str, schema.StateDictEntry],
    *,
    keep_torch_metadata: bool = False,
) -> None:
    """Write every node's owner and every initializer's origin and users into the model, in place."""
    if not keep_torch_metadata:
        drop_torch_metadata(model)
    for node in all_nodes(model):
        owner = owner_of(node)
        if owner is not None:  # what was made of another exporter's file may have none; export checks for them
            write_owner(node, owner, tags)
    for value in initializers(model):
        value.metadata_props[schema.HIERARCHY_TAGS] = json.dumps(initializer_tags(value, tags))
        origin = origins.get(value.name or "")
        if origin is not None:
            value.metadata_props[schema.PARAMETER] = json.dumps(origin.keys)
            if origin.transform:
                value.metadata_props[schema.TRANSFORM] = msgspec.json.encode(origin.transform).decode()
    model.metadata_props[schema.FORMAT_VERSION_KEY] = schema.FORMAT_VERSION
    model.metadata_props[schema.STATE_DICT] = msgspec.json.encode(entries).decode()
    model.metadata_props[schema.CALL_TREE] = msgspec.json.encode(call_tree_entries(tags)).decode()
    model.metadata_props[schema.VERSION_KEY] = modelexport.__version__


def write_owner(node: ir.Node, owner: Owner, tags: CallTags) -> None:
    """Write a node's owner into its metadata."""
    properties = node.metadata_props
    properties[schema.SOURCE_MODULE] = tags.source_tag(owner.call)
    properties[schema.CALL] = owner.call.address
    properties[schema.EVIDENCE] = owner.evidence.value
    properties[schema.NAMESPACE] = tags.namespace(owner.call)
    if len(owner.calls) > 1:
        properties[schema.HIERARCHY_TAGS] = json.dumps([tags.source_tag(call) for call in owner.calls])
        properties[schema.CALLS] = json.dumps([call.address for call in owner.calls])


def call_tree_entries(tags: CallTags) -> list[schema.CallTreeEntry]:
    """Every call with its tag and the call it ran in."""
    return [
        schema.CallTreeEntry(
            traced.call.address, tags.tag(traced.call), None if traced.parent is None else traced.parent.address
        )
        for traced in tags.calls
    ]


def initializer_tags(value: ir.Value, tags: CallTags) -> list[str]:
    """The tags of every call that uses an initializer, in the order of the nodes."""
    users: dict[str, None] = {}
    for node, _ in value.uses():
        owner = owner_of(node)
        if owner is not None:
            users.update((tags.source_tag(call), None) for call in owner.calls)
    return list(users)


def drop_torch_metadata(model: ir.Model) -> None:
    """Remove the exporter's own keys: most of the graph file, and paths of the machine that exported."""
    stores = [model.metadata_props]
    for graph in model.graphs():
        stores.append(graph.metadata_props)
        stores.extend(value.metadata_props for value in (*graph.inputs, *graph.initializers.values()))
    for node in all_nodes(model):
        node.doc_string = None
        stores.append(node.metadata_props)
        stores.extend(value.metadata_props for value in node.outputs)
    for store in stores:
        for key in [key for key in store if key == schema.NAMESPACE or key.startswith(_TORCH_KEYS)]:
            del store[key]

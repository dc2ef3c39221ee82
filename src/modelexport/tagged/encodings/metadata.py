"""The `metadata` encoding: owners as ``metadata_props`` of nodes and initializers."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import onnx_ir as ir

from modelexport.core.owners import Owner
from modelexport.core.tags import CallTags
from modelexport.core.text import json_texts
from modelexport.core.version import __version__
from modelexport.format import documents, keys
from modelexport.format.call_tree import call_tree_entries, encode_call_tree
from modelexport.format.node_tags import write_tags
from modelexport.graph.nodes import all_nodes, initializers
from modelexport.graph.owners import owner_of
from modelexport.graph.plain import PlainNode
from modelexport.weights.origins import Origin

_TORCH_KEYS = ("pkg.torch.", "pkg.onnxscript.")


def write_metadata(
    model: ir.Model,
    tags: CallTags,
    origins: Mapping[str, Origin],
    entries: Mapping[str, documents.StateDictEntry],
    *,
    keep_torch_metadata: bool = False,
) -> None:
    """Write every node's owner and every initializer's origin and users into the model, in place."""
    if not keep_torch_metadata:
        drop_torch_metadata(model)
    written: dict[int, tuple[Owner, dict[str, str]]] = {}  # by identity: nodes of one owner share it
    for node in all_nodes(model):
        owner = owner_of(node)
        if owner is not None:  # nodes of adopted files may have none; export checks for them
            if id(owner) not in written:
                written[id(owner)] = owner, owner_properties(owner, tags)
            _replace_tags(node, written[id(owner)][1])
    used: dict[tuple[int, ...], str] = {}  # by the identities of the users' owners
    encoded: dict[int, dict[str, str]] = {}
    for value in initializers(model):
        properties = value.metadata_props
        users = tuple([id(owner_of(node)) for node, _ in value.uses()])
        if users not in used:
            used[users] = json_texts(initializer_tags(value, tags))
        properties[keys.HIERARCHY_TAGS] = used[users]
        origin = origins.get(value.name or "")
        if origin is not None:
            if id(origin) not in encoded:
                encoded[id(origin)] = _origin_properties(origin)
            properties.update(encoded[id(origin)])
    model.metadata_props[keys.FORMAT_VERSION_KEY] = keys.FORMAT_VERSION
    model.metadata_props[keys.STATE_DICT] = msgspec.json.encode(entries).decode()
    model.metadata_props[keys.CALL_TREE] = encode_call_tree(call_tree_entries(tags.calls, tags.tag))
    model.metadata_props[keys.VERSION_KEY] = __version__


def _origin_properties(origin: Origin) -> dict[str, str]:
    properties = {keys.PARAMETER: json_texts(origin.keys)}
    if origin.transform:
        properties[keys.TRANSFORM] = msgspec.json.encode(origin.transform).decode()
    return properties


def write_owner(node: ir.Node, owner: Owner, tags: CallTags) -> None:
    """Write a node's owner into its metadata."""
    _replace_tags(node, owner_properties(owner, tags))


def owner_properties(owner: Owner, tags: CallTags) -> dict[str, str]:
    """The metadata of a node that an owner has."""
    properties: dict[str, str] = {}
    addresses = [call.address for call in owner.calls]
    write_tags(properties, addresses, [tags.source_tag(call) for call in owner.calls], owner.evidence)
    properties[keys.NAMESPACE] = tags.namespace(owner.call)
    properties[keys.LAYER_ANNOTATION] = owner.call.annotation
    return properties


def _replace_tags(node: ir.Node, written: dict[str, str]) -> None:
    properties = node.metadata_props
    if not properties and type(node) is PlainNode:
        node.metadata_props = written  # nodes share it: it is encoded once
        return
    for key in (keys.HIERARCHY_TAGS, keys.CALLS):  # of several owners
        properties.pop(key, None)
    properties.update(written)


def initializer_tags(value: ir.Value, tags: CallTags) -> list[str]:
    """The tags of every call that uses an initializer, in the order of the nodes."""
    users: dict[str, None] = {}
    for node, _ in value.uses():
        owner = owner_of(node)
        if owner is not None:
            users.update((tags.source_tag(call), None) for call in owner.calls)
    return list(users)


def drop_torch_metadata(model: ir.Model) -> None:
    """Remove the exporter's own keys, which take most of the graph file and contain paths of the exporting machine."""
    stores = [model.metadata_props]
    for graph in model.graphs():
        stores.append(graph.metadata_props)
        stores.extend(value.metadata_props for value in (*graph.inputs, *graph.initializers.values()))
    for node in all_nodes(model):
        node.doc_string = None
        stores += [node.metadata_props, *[value.metadata_props for value in node.outputs]]
    for store in stores:
        if store:
            for key in [key for key in store if key == keys.NAMESPACE or key.startswith(_TORCH_KEYS)]:
                del store[key]

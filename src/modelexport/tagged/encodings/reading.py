"""Converting the `attributes` and `functions` encodings to metadata of a flat graph, in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache

import onnx_ir as ir

from modelexport.core.calls import CallTree, ModuleCall, TracedCall
from modelexport.core.owners import Evidence
from modelexport.core.relative_addresses import relative_addresses
from modelexport.format import documents, keys
from modelexport.format.node_tags import read_addresses, read_source_tags, tag_properties
from modelexport.graph.inlined_functions import inline_calls
from modelexport.graph.nodes import all_nodes
from modelexport.graph.properties import drop_texts, properties_of, put_texts, text_of


def unpack_tags(model: ir.Model, entries: Mapping[TracedCall, documents.CallTreeEntry]) -> str:
    """Convert a model of any encoding to the `metadata` encoding, in place; returns its former encoding.

    Args:
        entries: Every call, with what the file records of it.

    Raises:
        KeyError, IndexError, TypeError, ValueError: The encoded tags are damaged.
    """
    encoding = text_of(model, keys.ENCODING) or "metadata"
    drop_texts([model], {keys.ENCODING})
    if encoding == "attributes":
        _unpack_attributes(model)
    elif encoding == "functions":
        _inline_functions(model, CallTree(tuple(entries)))
    elif encoding != "metadata":
        raise ValueError(f"unknown encoding '{encoding}'")
    return encoding


def _unpack_attributes(model: ir.Model) -> None:
    for node in all_nodes(model):
        properties = {keys.SOURCE_MODULE: node.attributes.pop(keys.SOURCE_MODULE_ATTRIBUTE).as_string()}
        tags = list(node.attributes.pop(keys.HIERARCHY_TAGS_ATTRIBUTE).as_strings())
        if len(tags) > 1:
            properties[keys.HIERARCHY_TAGS] = json.dumps(tags)
        put_texts(node, properties)


_CALLED = "called:"
"""The property of inlined nodes for each function that they were in, the outermost first: the call that it was, and the
tag that this adds to those in the body. Functions do not call themselves, so that each is there once."""


def _inline_functions(model: ir.Model, calls: CallTree) -> None:
    """Inline the functions of modules, in place: nodes get the addresses and tags that they have in a flat graph."""
    ours = {name for name in model.functions if name[0] == keys.FUNCTIONS_DOMAIN}
    for node in all_nodes(model):
        if node.op_identifier() in ours:
            properties = properties_of(node)
            call = [properties[keys.CALL], properties[keys.SOURCE_MODULE]]
            put_texts(node, {f"{_CALLED}{node.op_type}": json.dumps(call)}, only=True)
    inline_calls(model, domain=keys.FUNCTIONS_DOMAIN)
    model.opset_imports.pop(keys.FUNCTIONS_DOMAIN, None)

    @cache
    def inside(call: ModuleCall) -> Mapping[str, ModuleCall]:
        return {address: within for within, address in relative_addresses(calls, call).items()}

    for node in list(all_nodes(model)):
        properties = properties_of(node)
        called = [json.loads(properties.pop(key)) for key in list(properties) if key.startswith(_CALLED)]
        if called:
            body, prefix = calls.calls[0].call, ""
            for address, tag in called:
                body, prefix = inside(body)[address], prefix + tag
            known = inside(body)
            addresses = [
                address[2:] if address.startswith("//") and address not in known else known[address].address
                for address in read_addresses(properties)
            ]
            tags = [tag[1:] if tag.startswith("//") else prefix + tag for tag in read_source_tags(properties)]
            properties.update(tag_properties(addresses, tags, Evidence(properties[keys.EVIDENCE])))
            put_texts(node, properties, only=True)

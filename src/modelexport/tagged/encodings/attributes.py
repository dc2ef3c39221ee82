"""The `attributes` encoding: tags as literal node attributes, which ``onnx.checker`` and ONNX Runtime refuse."""

from __future__ import annotations

import json

import onnx_ir as ir

from modelexport.format import keys
from modelexport.graph.nodes import all_nodes


def write_attributes(model: ir.Model) -> None:
    """Move the tags of every node from its metadata to its attributes, in place.

    ``source_module`` is a string; ``hierarchy_tags`` are strings, one where the node has one owner. The rest of what
    is known of a node stays in its metadata.
    """
    for node in all_nodes(model):
        source = node.metadata_props.pop(keys.SOURCE_MODULE)
        tags = json.loads(node.metadata_props.pop(keys.HIERARCHY_TAGS, json.dumps([source])))
        node.attributes.add(ir.AttrString(keys.SOURCE_MODULE_ATTRIBUTE, source))
        node.attributes.add(ir.AttrStrings(keys.HIERARCHY_TAGS_ATTRIBUTE, tags))
    model.metadata_props[keys.ENCODING] = "attributes"

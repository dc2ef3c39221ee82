"""The `attributes` encoding: tags as literal node attributes, which ``onnx.checker`` and ONNX Runtime refuse."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.format import keys
from modelexport.format.node_tags import read_source_tags
from modelexport.graph.nodes import all_nodes


def write_attributes(model: ir.Model) -> None:
    """Move the tags of every node from its metadata to its attributes, in place.

    ``source_module`` is a string; ``hierarchy_tags`` is a list of strings, one for each owner. The other properties of
    a node stay in its metadata.
    """
    for node in all_nodes(model):
        tags = read_source_tags(node.metadata_props)
        for key in (keys.SOURCE_MODULE, keys.HIERARCHY_TAGS):
            node.metadata_props.pop(key, None)
        node.attributes.add(ir.AttrString(keys.SOURCE_MODULE_ATTRIBUTE, tags[0]))
        node.attributes.add(ir.AttrStrings(keys.HIERARCHY_TAGS_ATTRIBUTE, tags))
    model.metadata_props[keys.ENCODING] = "attributes"

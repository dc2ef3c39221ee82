"""The `attributes` encoding: tags as literal node attributes, which ``onnx.checker`` and ONNX Runtime refuse."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.core.tags import CallTags
from modelexport.format import keys
from modelexport.graph.node_owners import required_owner
from modelexport.graph.nodes import all_nodes
from modelexport.graph.properties import drop_texts, put_texts


def write_attributes(model: ir.Model, tags: CallTags) -> None:
    """Move the tags of every node from its metadata to its attributes, in place.

    ``source_module`` is a string; ``hierarchy_tags`` is a list of strings, one for each owner. The other properties of
    a node stay in its metadata.
    """
    for node in all_nodes(model):
        drop_texts([node], (keys.SOURCE_MODULE, keys.HIERARCHY_TAGS))
        source_tags = [tags.source_tag(call) for call in required_owner(node).calls]
        node.attributes.add(ir.AttrString(keys.SOURCE_MODULE_ATTRIBUTE, source_tags[0]))
        node.attributes.add(ir.AttrStrings(keys.HIERARCHY_TAGS_ATTRIBUTE, source_tags))
    put_texts(model, {keys.ENCODING: "attributes"})

"""Writes the tags of a model into it, in the encoding of its file, just before the model is written."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.core.tags import CallTags
from modelexport.tagged.encodings.attributes import write_attributes
from modelexport.tagged.encodings.functions import write_functions
from modelexport.tagged.encodings.metadata import write_tags


def encoded(model: ir.Model, tags: CallTags, encoding: str = "metadata") -> ir.Model:
    """A flat model with its tags, which are made from the owners of its nodes and from its calls.

    Args:
        model: Changed in place.
        encoding: One of :data:`modelexport.tagged.encodings.Encoding`.

    Returns:
        The same model, or one with functions.
    """
    write_tags(model, tags)
    if encoding == "functions":
        return write_functions(model, tags).model
    if encoding == "attributes":
        write_attributes(model, tags)
    return model

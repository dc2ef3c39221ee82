"""Comparing the attributes of two nodes."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from modelexport.graph.nodes import PLAIN_TYPES

_BY_IDENTITY = (ir.AttributeType.TENSOR, ir.AttributeType.GRAPH, ir.AttributeType.TENSORS, ir.AttributeType.GRAPHS)


def are_equal(one: Mapping[str, ir.Attr], other: Mapping[str, ir.Attr]) -> bool:
    """Whether attributes are known to be equal; tensors and graphs only if they are the same object."""
    return one.keys() == other.keys() and all(
        attribute is other[name] or (attribute.type not in _BY_IDENTITY and attribute.value == other[name].value)
        for name, attribute in one.items()
    )


def may_be_equal(one: Mapping[str, ir.Attr], other: Mapping[str, ir.Attr]) -> bool:
    """Whether attributes do not contradict each other: a node may omit attributes that have their default value."""
    return all(
        attribute.type != other[name].type or attribute.value == other[name].value
        for name, attribute in one.items()
        if name in other and attribute.type in PLAIN_TYPES and not attribute.is_ref()
    )

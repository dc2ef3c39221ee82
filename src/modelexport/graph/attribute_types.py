"""Kinds of attributes."""

from __future__ import annotations

import onnx_ir as ir

PLAIN_TYPES = frozenset(
    {
        ir.AttributeType.INT,
        ir.AttributeType.INTS,
        ir.AttributeType.FLOAT,
        ir.AttributeType.FLOATS,
        ir.AttributeType.STRING,
        ir.AttributeType.STRINGS,
    }
)
"""Attributes that are numbers and texts, which can be compared and copied by value."""

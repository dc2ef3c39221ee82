"""What operators of the ONNX standard have in common, by name: those that only move elements, that convert, quantize.

A list of operators elsewhere is one of these sets and the few operators that its own question adds, or it answers
another question, such as which kernels a runtime has.
"""

from __future__ import annotations

KEEPS_ORDER = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that give the elements of their first input in the same order: another shape at most."""
MOVES_ELEMENTS = KEEPS_ORDER | {"DepthToSpace", "ReverseSequence", "SpaceToDepth", "Transpose"}
"""Operators that give each element of their first input once, in any order."""
SELECTS_ELEMENTS = MOVES_ELEMENTS | {
    "Compress", "Concat", "Expand", "Gather", "GatherElements", "GatherND", "Slice", "Split", "Tile",
}  # fmt: skip
"""Operators that give nothing but elements of their first input (``Concat``: of all inputs), some or repeated."""

CASTS = frozenset({"Cast", "CastLike"})
"""Operators that give the elements of their first input as another type."""
QUANTIZERS = frozenset({"DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear"})
"""Operators between floating-point numbers and integers with a scale."""
READ_SIZES_ONLY = frozenset({"Shape", "Size"})
"""Operators that read the sizes of what they take, and no value of it."""
POOLS = frozenset({"AveragePool", "LpPool", "MaxPool"})
"""Operators that reduce each window of ``kernel_shape`` to one number."""
RECURRENT = frozenset({"GRU", "LSTM", "RNN"})

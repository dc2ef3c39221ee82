"""Pooling with ``ceil_mode`` whose last window would begin in the padding: PyTorch and ONNX Runtime leave it out.

ONNX's own inference counts it, so that a file would declare sizes that its values do not have, and ``onnx.checker``
refuses the sizes that they have. Where the sizes are fixed, the same windows are written without ``ceil_mode``.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from modelexport.graph.nodes import all_nodes

_POOLS = ("AveragePool", "LpPool", "MaxPool")


def without_last_windows(model: ir.Model) -> Iterator[ir.Node]:
    """Change each such node, in place; yields it after that."""
    for node in all_nodes(model):
        if node.op_type in _POOLS and node.domain == "" and node.attributes.get_int("ceil_mode", 0) == 1:
            ends = _ends(node)
            if ends is not None:
                pads = list(node.attributes.get_ints("pads", [0] * 2 * len(ends)))
                node.attributes["pads"] = ir.AttrInt64s("pads", [*pads[: len(ends)], *ends])
                node.attributes["ceil_mode"] = ir.AttrInt64("ceil_mode", 0)
                if not any(pads):
                    node.attributes.pop("count_include_pad", None)
                yield node


def _ends(node: ir.Node) -> list[int] | None:
    """The padding at the end of each axis that gives PyTorch's windows; ``None`` if nothing has to change, or can."""
    attributes, value = node.attributes, node.inputs[0]
    kernel = attributes.get_ints("kernel_shape", [])
    axes = len(kernel)
    sizes = list(value.shape or ())[2:] if value is not None else []
    if len(sizes) != axes or not all(isinstance(size, int) for size in sizes):
        return None
    if attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    strides = attributes.get_ints("strides", [1] * axes)
    dilations = attributes.get_ints("dilations", [1] * axes)
    pads = attributes.get_ints("pads", [0] * 2 * axes)
    ends, left_out, longer = [], False, False
    for axis, size in enumerate(sizes):
        assert isinstance(size, int)
        begin, end, stride = pads[axis], pads[axes + axis], strides[axis]
        length = dilations[axis] * (kernel[axis] - 1) + 1
        last = -(-(size + begin + end - length) // stride)
        if last * stride >= size + begin:
            left_out, last = True, last - 1
        needed = last * stride + length - size - begin
        longer |= needed > end
        ends.append(max(needed, end))
    # The average of a window divides by the padding in it too, but not by what lies behind the padding.
    counts_padding = any(pads) and attributes.get_int("count_include_pad", 0) == 1
    return ends if left_out and not (longer and counts_padding) else None

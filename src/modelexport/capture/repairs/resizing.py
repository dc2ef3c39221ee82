"""Images of other sizes. Interpolation by a scale: along an axis that keeps its size PyTorch copies, unlike ONNX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from modelexport.graph.narrow_to_float32 import graph_of
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import all_nodes


def copy_along_equal_sizes(model: ir.Model) -> None:
    """Let each ``Resize`` have the scale 1 along axes whose size it keeps, as 7 of 7 by a scale of 1.1, in place.

    PyTorch does so in its linear modes and in ``nearest``, but not in ``bicubic`` and ``nearest-exact``.
    """
    for node in list(all_nodes(model)):
        modes = (node.attributes.get_string("mode", "nearest"),
                 node.attributes.get_string("coordinate_transformation_mode", "half_pixel"))  # fmt: skip
        copies = modes[0] == "linear" or modes == ("nearest", "asymmetric")
        scales = node.inputs[2] if node.op_type == "Resize" and len(node.inputs) == 3 else None
        if scales is None or not copies or "axes" in node.attributes:
            continue
        known = ir.convenience.get_const_tensor(scales)
        numbers = np.array([1.5]) if known is None else known.numpy()
        if ((numbers > 1) & (numbers < 2)).any():  # any other scale changes every size
            node.replace_input_with(2, _scales(node, scales, None if known is None else numbers))


def _scales(node: ir.Node, scales: ir.Value, numbers: np.ndarray | None) -> ir.Value:
    """The scales of a node, one where they keep a size: a constant if the sizes are known."""
    (data, name), shape = (node.inputs[0], f"{node.name}.scales"), node.inputs[0].shape if node.inputs[0] else None
    if numbers is not None and shape is not None and all(isinstance(size, int) for size in shape):
        sizes = np.array(shape.numpy())
        plain = np.where(np.floor(sizes * numbers) == sizes, 1, numbers).astype(np.float32)
        nodes = [ir.node("Constant", [], {"value": ir.tensor(plain)}, name=name)]
    else:
        shape_of = ir.node("Shape", [data], name=f"{name}.shape")
        sizes_of = ir.node("Cast", shape_of.outputs, {"to": ir.DataType.FLOAT}, name=f"{name}.sizes")
        product = ir.node("Mul", [sizes_of.outputs[0], scales], name=f"{name}.product")
        floor = ir.node("Floor", product.outputs, name=f"{name}.floor")
        equal = ir.node("Equal", [floor.outputs[0], sizes_of.outputs[0]], name=f"{name}.equal")
        unit = ir.node("Constant", [], {"value": ir.tensor(np.float32(1))}, name=f"{name}.one")
        chosen = ir.node("Where", [equal.outputs[0], unit.outputs[0], scales], name=name)
        nodes = [shape_of, sizes_of, product, floor, equal, unit, chosen]
    for new in nodes:
        new.outputs[0].name = new.name
        set_owner(new, owner_of(node))
    graph_of(node).insert_before(node, nodes)
    return nodes[-1].outputs[0]


def linear(self: Any, output_size: Any, align_corners: bool, scale_factors: Sequence[float] | None) -> Any:
    """Linear interpolation along one axis as along two: PyTorch's own decomposition does not copy along equal sizes."""
    size, scales = (None if numbers is None else [1, *numbers] for numbers in (output_size, scale_factors))
    return torch.ops.aten.upsample_bilinear2d.vec(self.unsqueeze(2), size, align_corners, scales).squeeze(2)


def pixels_of_channels(self: Any, upscale_factor: int) -> Any:
    """``pixel_shuffle`` of integers and booleans, for which ONNX Runtime has no kernel."""
    if self.is_floating_point():
        return NotImplemented
    blocks = self.unflatten(-3, (-1, upscale_factor, upscale_factor))
    axes = [*range(self.dim() - 3), -5, -2, -4, -1, -3]
    return blocks.permute(axes).flatten(-4, -3).flatten(-2, -1)

"""Images of other sizes. Along an axis that keeps its size PyTorch copies, unlike ONNX. It multiplies places by the
share of two sizes where ONNX Runtime divides by their ratio: rounded to float32, these are other pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from modelexport.graph.narrow_to_float32 import graph_of
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import all_nodes
from modelexport.regions.region import Region, put


def copy_along_equal_sizes(model: ir.Model) -> None:
    """Let each ``Resize`` have the scale 1 along axes whose size it keeps, as 7 of 7 by a scale of 1.1, in place.

    PyTorch does so in its linear modes, but not in ``bicubic``; of ``nearest``, see :func:`pick_pixels_as_pytorch`.
    """
    for node in list(all_nodes(model)):
        copies = node.attributes.get_string("mode", "nearest") == "linear"
        scales = node.inputs[2] if node.op_type == "Resize" and len(node.inputs) == 3 else None
        if scales is None or not copies or "axes" in node.attributes:
            continue
        known = _constant(scales)
        numbers = np.array([1.5]) if known is None else known
        if ((numbers > 1) & (numbers < 2)).any():  # any other scale changes every size
            node.replace_input_with(2, _scales(node, scales, known))


def give_sizes_of_pytorch(model: ir.Model) -> None:
    """Let each ``Resize`` by scales give the sizes of PyTorch, which multiplies in float64, in place.

    Ten times 0.7 is 7 in float64 and in ONNX Runtime, but below 7 for the nearest float32, as onnx's inference has it;
    90 times 0.7 is below 63 in float64, but not in ONNX Runtime. The scales are the next float32 that gives the size.
    """
    for node in list(all_nodes(model)):
        scales = node.inputs[2] if node.op_type == "Resize" and len(node.inputs) == 3 else None
        chosen = scales.producer() if scales is not None else None
        user = chosen if chosen is not None and chosen.op_type == "Where" else node  # of copy_along_equal_sizes
        known = None if scales is None or user.inputs[2] is None else _constant(user.inputs[2])
        if known is None or node.inputs[0] is None or "axes" in node.attributes:
            continue
        written = np.array([float(str(number)) for number in known])
        if (written != known).any():  # else nothing was rounded
            user.replace_input_with(2, _scales_for_sizes(node, user, known, written))


def _scales_for_sizes(node: ir.Node, user: ir.Node, known: np.ndarray, written: np.ndarray) -> ir.Value:
    """Scales that give PyTorch's sizes, of those in float32 and as they were written: constant if the sizes are."""
    name, shape = f"{node.name}.sizes", None if node.inputs[0] is None else node.inputs[0].shape
    nodes: list[ir.Node] = []

    def add(op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        nodes.append(ir.node(op_type, inputs, attributes, name=f"{name}.{len(nodes)}"))
        nodes[-1].outputs[0].name = nodes[-1].name
        set_owner(nodes[-1], owner_of(node))
        return nodes[-1].outputs[0]

    def number(array: Any) -> ir.Value:
        return add("Constant", value=ir.tensor(array))

    lower, upper = (known * np.float32(1 + change) for change in (-_STEP, _STEP))
    if shape is not None and all(isinstance(size, int) for size in shape):
        before = np.array(shape.numpy())
        after = np.floor(before * written)
        larger = (np.floor(before.astype(np.float32) * known) > after) & (written != known)
        smaller = (np.floor(before * known.astype(np.float64)) < after) & (written != known)
        result = number(np.where(larger, lower, np.where(smaller, upper, known)).astype(np.float32))
        node.outputs[0].shape = ir.Shape(after.astype(int).tolist())  # TorchScript's exporter multiplies in float32
    else:
        sizes = add("Shape", node.inputs[0])
        after = add("Floor", add("Mul", add("Cast", sizes, to=ir.DataType.DOUBLE), number(written)))
        given = add("Floor", add("Mul", add("Cast", sizes, to=ir.DataType.FLOAT), number(known)))
        exact = add("Cast", given, to=ir.DataType.DOUBLE)
        not_larger = add("Where", add("Less", exact, after), number(upper), number(known))
        result = add("Where", add("Greater", exact, after), number(lower), not_larger)
    graph_of(user).insert_before(user, nodes)
    return result


_STEP = 2.0**-22
"""By how much a scale is changed, as a share of it: a few of the next numbers of float32."""


def pick_pixels_as_pytorch(model: ir.Model) -> None:
    """Replace each ``Resize`` that copies the nearest pixels by a ``Gather`` for each axis, in place.

    It stays if ONNX Runtime picks PyTorch's pixels for all sizes of the file.
    """
    for node in list(all_nodes(model)):
        modes = {name: node.attributes.get_string(name, "") for name in _NEAREST}
        data, known = node.inputs[0] if node.op_type == "Resize" else None, node.inputs[-1] if node.inputs else None
        if data is None or data.shape is None or known is None or modes != _NEAREST or "axes" in node.attributes:
            continue
        given = _constant(known) if len(node.inputs) == 3 else None
        if len(node.inputs) == 3 and given is None:
            continue
        # A number of Python was rounded to float32; the shortest that rounds to it is the one that a person wrote.
        scales = None if given is None else [float(str(number)) for number in given]
        axes = [_Axis(index, node, None if scales is None else scales[index]) for index in range(2, len(data.shape))]
        if any(not axis.is_right_in_runtime() for axis in axes):
            _gather(model, node, [axis for axis in axes if axis.before is None or axis.before != axis.after])


def _constant(value: ir.Value) -> np.ndarray | None:
    """The elements of a constant, also of one that is joined of several; ``None`` of anything else."""
    maker, tensor = value.producer(), ir.convenience.get_const_tensor(value)
    if maker is not None and maker.op_type == "Concat":
        parts = [None if part is None else _constant(part) for part in maker.inputs]
        return None if any(part is None for part in parts) else np.concatenate([p for p in parts if p is not None])
    return None if tensor is None else tensor.numpy()


_NEAREST = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}


class _Axis:
    """One axis along which a ``Resize`` copies pixels, with its sizes where they are known."""

    def __init__(self, index: int, node: ir.Node, scale: float | None) -> None:
        self.index, self.scale, self._node = index, scale, node
        shapes = [value.shape if value is not None else None for value in (node.inputs[0], node.outputs[0])]
        sizes = (size if shape is not None and isinstance(size := shape[index], int) else None for shape in shapes)
        self.before: int | None = next(sizes)
        self.after: int | None = next(sizes)
        if self.before is not None and scale is not None:  # TorchScript's exporter multiplies in float32
            self.after = math.floor(self.before * scale)

    def is_right_in_runtime(self) -> bool:
        """Whether ONNX Runtime picks the pixels that PyTorch picks, for every size that the file takes."""
        if self.before is None or self.after is None:
            return self.scale is not None and math.frexp(self.scale)[0] == 0.5  # a power of two: nothing is rounded
        ratio = np.float32(self.after) / np.float32(self.before) if self.scale is None else np.float32(self.scale)
        places = np.floor(np.arange(self.after, dtype=np.float32) / ratio)
        products = (np.float32(self.before) * ratio, self.before * float(ratio))
        if self.scale is not None and any(math.floor(product) != self.after for product in products):
            return False
        return bool((np.minimum(places, self.before - 1) == self._picked(self.before, self.after)).all())

    def _picked(self, before: int, after: int) -> np.ndarray:
        """The pixels that PyTorch picks."""
        share = np.float32(before) / np.float32(after) if self.scale is None else np.float32(1 / self.scale)
        places = np.arange(after, dtype=np.float32) * (np.float32(1) if before == after else share)
        return np.minimum(np.floor(places), before - 1).astype(np.int64)

    def pixels(self) -> list[ir.Node]:
        """The nodes that compute the positions of the picked pixels; the last one returns them."""
        name, node = f"{self._node.name}.{self.index}", self._node
        if self.before is not None and self.after is not None:
            return [ir.node("Constant", [], {"value": ir.tensor(self._picked(self.before, self.after))}, name=name)]
        nodes: list[ir.Node] = []

        def add(op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
            nodes.append(ir.node(op_type, inputs, attributes, name=f"{name}.{len(nodes)}"))
            return nodes[-1].outputs[0]

        def number(array: Any) -> ir.Value:
            return add("Constant", value=ir.tensor(array))

        place = number(np.array([self.index]))
        size = add("Gather", add("Shape", node.inputs[0]), place)
        before = add("Cast", size, to=ir.DataType.FLOAT)
        if self.scale is None:
            after = add("Cast", add("Gather", node.inputs[3], place), to=ir.DataType.FLOAT)
            share = add("Div", before, after)
        else:
            product = add("Mul", add("Cast", size, to=ir.DataType.DOUBLE), number(np.array([self.scale])))
            after = add("Cast", add("Floor", product), to=ir.DataType.FLOAT)
            copies = add("Equal", before, after)
            share = add("Where", copies, number(np.float32(1)), number(np.array([1 / self.scale], np.float32)))
        zero, one = number(np.float32(0)), number(np.float32(1))
        places = add("Range", zero, add("Squeeze", after), one)
        last = add("Sub", before, one)
        add("Cast", add("Min", add("Floor", add("Mul", places, share)), last), to=ir.DataType.INT64)
        return nodes


def _gather(model: ir.Model, node: ir.Node, axes: Sequence[_Axis]) -> None:
    """Put a ``Gather`` for each axis in the place of a node."""
    result, (value,) = node.inputs[0], node.outputs
    nodes: list[ir.Node] = []
    for axis in axes:
        nodes += axis.pixels()
        name = f"{node.name}.along_{axis.index}"
        nodes.append(ir.node("Gather", [result, nodes[-1].outputs[0]], {"axis": axis.index}, name=name))
        result = nodes[-1].outputs[0]
    for new in nodes:
        new.outputs[0].name = new.name
    last = nodes[-1].outputs[0]
    put(model, nodes, [last], Region({node: None}, [], [value]), dict.fromkeys(nodes, owner_of(node)))
    for axis in axes:
        if last.shape is not None and axis.after is not None:
            last.shape[axis.index] = axis.after


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

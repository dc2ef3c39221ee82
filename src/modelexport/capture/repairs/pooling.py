"""Pooling whose windows differ in size (adaptive pooling) or have random positions (fractional pooling)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.function_libs.torch_lib.ops import nn as torchlib

from modelexport.capture.numbers_of_python import node_like
from modelexport.capture.patches import private
from modelexport.graph.bound_tensors import bind_tensors
from modelexport.graph.nodes import all_nodes
from modelexport.graph.operator_kinds import CASTS, POOLS


def _windows(size: int, out: int) -> tuple[Any, Any]:
    """Where the windows of an adaptive pooling begin and end along an axis, ``[out]`` each."""
    places = torch.arange(out)
    return places * size // out, ((places + 1) * size + out - 1) // out


def _sizes(self: Any, output_size: Sequence[int | None]) -> list[tuple[int, int]]:
    """The size of each pooled axis, and that of the output."""
    sizes = self.shape[-len(output_size) :]
    return [(size, size if out is None else out) for size, out in zip(sizes, output_size, strict=True)]


def adaptive_max_pool(self: Any, output_size: Sequence[int]) -> Any:
    """torch.onnx does not translate it if the output's size does not divide the input's or the indices are used."""
    sizes = _sizes(self, output_size)
    if not all(isinstance(size, int) for size, _ in sizes):
        return _maxima_of_dynamic_axes(self, sizes)
    inside = []
    for size, out in sizes:
        starts, ends = _windows(size, out)
        longest = max(-(-(i + 1) * size // out) - i * size // out for i in range(out))
        inside.append(torch.minimum(starts.unsqueeze(1) + torch.arange(longest), ends.unsqueeze(1) - 1))
    return _maxima(self, inside)


def _maxima_of_dynamic_axes(self: Any, sizes: Sequence[tuple[Any, int]]) -> Any:
    """The maximum of each window and its position, by a table of which elements are in which window."""
    axes, inside = len(sizes), torch.full((), True)
    for axis, (size, out) in enumerate(sizes):
        spread = [1] * (2 * axes)
        spread[axis], spread[axes + axis] = out, size
        inside = inside & _in_windows(size, out).reshape(spread)
    windows = torch.where(inside.flatten(axes), self.flatten(-axes)[(..., *[None] * axes, slice(None))], float("-inf"))
    largest, place = windows.max(-1)
    return largest, place


def _in_windows(size: Any, out: int) -> Any:
    """Whether each window of an adaptive pooling along an axis has each element, ``[out, size]``."""
    starts, ends = (bounds.unsqueeze(1) for bounds in _windows(size, out))
    places = torch.arange(size)
    return (places >= starts) & (places < ends)


def _maxima(self: Any, inside: Sequence[Any]) -> Any:
    """The maximum of each window and its position.

    Args:
        inside: For each pooled axis the positions in each window along it, ``[..., out, length]``.
    """
    axes, sizes = len(inside), list(self.shape[-len(inside) :])
    flat: Any = 0
    for axis, places in enumerate(inside):
        spread = [1] * (2 * axes)
        spread[axis], spread[axes + axis] = places.shape[-2:]
        flat = flat + (places * math.prod(sizes[axis + 1 :])).reshape(*places.shape[:-2], *spread)
    laid = self.flatten(-axes)
    flat = flat.flatten(-axes).expand(*laid.shape[:-1], *flat.shape[-2 * axes : -axes], -1)
    windows = laid.gather(-1, flat.reshape(*laid.shape[:-1], -1)).reshape(flat.shape)
    largest, place = windows.max(-1)
    return largest, flat.gather(-1, place.unsqueeze(-1)).squeeze(-1)


def adaptive_average_pool(self: Any, output_size: Sequence[int]) -> Any:
    """Along each axis it is a product with a matrix, except in two dimensions of fixed sizes."""
    sizes = _sizes(self, output_size)
    if len(sizes) < _PLANES and all(isinstance(size, int) for both in sizes for size in both):
        return private("definitions")[torch.ops.aten._adaptive_avg_pool2d.default](self, output_size)
    for axis, (size, out) in enumerate(sizes, -len(sizes)):
        if isinstance(out, torch.SymInt) and str(out) == str(size):  # the same formula of sizes
            continue
        inside = _in_windows(size, out).to(self.dtype)
        self = (self.movedim(axis, -1) @ (inside / inside.sum(1, keepdim=True)).mT).movedim(-1, axis)
    return self


_PLANES = 3


def average_with_divisor(pool: Callable[..., Any], axes: int) -> Callable[..., Any]:
    """Average pooling with ``divisor_override``, which torchlib ignores: averages of whole windows, multiplied."""

    def averaged(
        self: Any,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        if divisor_override is None:
            return NotImplemented
        settings = (kernel_size, stride or kernel_size, padding)
        lengths, steps, pads = ([*numbers] * (axes if len(numbers) == 1 else 1) for numbers in settings)
        ends = [pad + step - 1 if ceil_mode else pad for pad, step in zip(pads, steps, strict=True)]
        around = [size for sides in reversed([*zip(pads, ends, strict=True)]) for size in sides]
        averages = pool(torch.nn.functional.pad(self, around), lengths, steps) * (math.prod(lengths) / divisor_override)
        for axis, step, pad in zip(range(-axes, 0), steps, pads, strict=True):
            if ceil_mode:  # no window begins behind the input
                count = torch.sym_min(averages.shape[axis], (self.shape[axis] + pad - 1) // step + 1)
                averages = averages.index_select(axis, torch.arange(count))
        return averages

    return averaged


def fractional_max_pool(self: Any, kernel_size: Sequence[int], output_size: Sequence[int], samples: Any) -> Any:
    """torch.onnx does not translate it. The windows begin at the random samples, an input of the operator."""
    axes = len(kernel_size)
    sizes = self.shape[-axes:]
    if self.dim() != axes + 2 or not all(isinstance(size, int) for size in sizes):
        raise ValueError("fractional pooling needs a batch, and axes of fixed sizes")
    inside = []
    for axis, (size, kernel, out) in enumerate(zip(sizes, kernel_size, output_size, strict=True)):
        sample = samples[..., axes - 1 - axis].unsqueeze(-1)  # PyTorch stores the samples of the last axis first
        alpha, steps = (size - kernel) / max(out - 1, 1), torch.arange(out - 1)
        begun = ((steps + sample) * alpha).long() - (sample * alpha).long()
        starts = torch.cat([begun, torch.full_like(sample, size - kernel, dtype=torch.long)], -1)
        inside.append(starts.unsqueeze(-1) + torch.arange(kernel))
    return _maxima(self, inside)


def max_pools() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Torchlib's pooling, after which ONNX Runtime does not fold a ``Pad`` of zeros into it.

    Its padding counts for nothing, and zeros count. Runtimes compare with the number zero, which -0.0 is not, bit by
    bit. https://github.com/onnx/optimizer/pull/318 corrects the same rule in another tool.
    """
    names = [f"max_pool{axes}d{suffix}" for axes in (1, 2, 3) for suffix in ("", "_with_indices")]
    return {
        getattr(torch.ops.aten, name).default: _after_pads(getattr(torchlib, f"aten_{name}"))
        for name in names
        if hasattr(torchlib, f"aten_{name}")
    }


def _after_pads(pool: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(pool)
    def pooled(self: Any, *args: Any, **kwargs: Any) -> Any:
        pad = self.producer()
        if pad is not None and pad.op_type == "Pad" and pad.graph is not None:
            constant = _before_casts(pad.inputs[2] if len(pad.inputs) > 2 else None)
            value = None if constant is None else ir.convenience.get_const_tensor(constant)
            if constant is None or (value is not None and not value.numpy().any()):
                _pad_with_negative_zero(pad, self.dtype)
        return pool(self, *args, **kwargs)

    return pooled


def _pad_with_negative_zero(pad: ir.Node, dtype: ir.DataType) -> None:
    """Change the constant of a ``Pad`` in place, so that it still belongs to the call that pads."""
    zero = ir.tensor(np.array(-0.0, dtype=dtype.numpy()))
    node = node_like("Constant", [], {"value": zero}, pad)
    value = node.outputs[0]
    value.name = f"{pad.outputs[0].name}_zero"
    bind_tensors({value: zero})
    value.shape, value.type = ir.Shape([]), ir.TensorType(dtype)
    assert pad.graph is not None
    pad.graph.insert_before(pad, node)
    if len(pad.inputs) < 3:
        pad.resize_inputs(3)
    pad.replace_input_with(2, value)


def _before_casts(value: ir.Value | None) -> ir.Value | None:
    """The value that another type of number was made of."""
    while value is not None and (maker := value.producer()) is not None and maker.op_type in CASTS:
        value = maker.inputs[0]
    return value


def without_last_windows(model: ir.Model) -> Iterator[ir.Node]:
    """Change each such node, in place; yields it after that."""
    for node in all_nodes(model):
        if node.op_type in POOLS and node.domain == "" and node.attributes.get_int("ceil_mode", 0) == 1:
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

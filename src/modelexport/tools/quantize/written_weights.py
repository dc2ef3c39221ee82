"""Compares what a quantizer wrote with the floating-point model: weights and biases as products use them, and ranges.

A one in each place of the input of a product gives the elements of its weight, with the zero points, scales and factors
that the graph applies to them. Each has to be within some steps of the floating-point element: half of one for
rounding, another half where a method rounds zero points as well.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from modelexport.errors import CheckError
from modelexport.files.map_types import model_of
from modelexport.graph.node_owners import place_of
from modelexport.tools.quantize.methods import Method
from modelexport.traces.tolerances import SUMS_IN_FLOAT32
from modelexport.weights.packed.bit_packing import unpack


@dataclass(frozen=True)
class Stored:
    """Constant numbers, or the weight of a product that a node returns, and the bias that is added to that."""

    array: Any
    step: Any = 0.0
    """Between two numbers that can be stored; it broadcasts with the numbers."""
    bias: Stored | None = None
    is_product: bool = False


_COMPUTED = Stored(np.float32(np.nan))
"""A bias that is not constant."""


class _Places(NamedTuple):
    """Positions of the inputs of a product."""

    weight: int
    scale: int | None = None
    zero: int | None = None
    bias: int | None = None
    channel: int = -1
    """The axis of the weight that scales and zero points are for."""
    axes: tuple[int, int] | None = None
    """Axes of the weight that change places, so that what the results are multiplied with broadcasts with it."""


_PRODUCTS: Mapping[str, Sequence[_Places]] = {
    **dict.fromkeys(("MatMul", "FusedMatMul"), (_Places(1),)),
    **dict.fromkeys(("Gemm", "ConvTranspose", "Attention"), (_Places(1, bias=2),)),
    "Conv": [_Places(1, bias=2, axes=(0, 1))],
    "Gather": [_Places(0)],
    "LSTM": [_Places(1, bias=3, axes=(1, 2)), _Places(2, axes=(1, 2))],
    "MatMulInteger": [_Places(1, zero=3)],
    "ConvInteger": [_Places(1, zero=3, channel=0, axes=(0, 1))],
    "DynamicQuantizeLSTM": [_Places(1, 8, 9, bias=3, channel=0), _Places(2, 10, 11, channel=0)],
    "QAttention": [_Places(1, 4, 7, bias=2)],
    "MatMulNBits": [_Places(1, 2, 3, bias=5, axes=(0, 1))],
    "GatherBlockQuantized": [_Places(0, 2, 3)],
}
_MOST_INPUTS = 12
_SAME = ("Cast", "Clip", "DequantizeLinear", "Identity", "QuantizeLinear", "Relu")
"""Operators after which a product counts as the same: quantizers may leave ``Relu`` to the range of integers."""
_BYTE = 8


def products(model: onnx.ModelProto) -> dict[str, Stored]:
    """The values of a model that are products with constant weights, by name."""
    graph = model_of(model).graph
    graph.sort()
    known: dict[ir.Value | None, Stored | None] = {
        value: _constant(value.const_value) for value in graph.initializers.values()
    }
    for node in graph:
        result = _result(node, [known.get(value) for value in node.inputs] + [None] * _MOST_INPUTS)
        known.update(dict.fromkeys(node.outputs, result))
        if node.op_type == "DynamicQuantizeLinear":  # the code of a one is 1
            known.update(zip(node.outputs, [None, Stored(np.float32(1)), Stored(np.float32(0))], strict=True))
    return {value.name or "": found for value, found in known.items() if value and found and found.is_product}


def check_written(
    nodes: Sequence[ir.Node],
    method: Method,
    before: Mapping[str, Stored],
    changed: onnx.ModelProto,
    ranges: Path | None = None,
) -> None:
    """Refuse weights that a quantizer rounded by more than its method does, and ranges that are not those of the data.

    Args:
        nodes: What was quantized.
        before: The products of a model of these nodes.
        changed: That model after the quantizer.
        ranges: What calibration measured, if the method needs it.

    Raises:
        CheckError: A product is another.
    """
    try:
        apart = _steps_apart(before, products(changed))
    except ValueError:  # scales that do not broadcast with what they are for
        apart = dict.fromkeys(before, math.inf)
    wrong = {
        name: f"is off by {steps:.3g} steps of its scale"
        if math.isfinite(steps)
        else "is not a product with these weights in a known form"
        for name, steps in apart.items()
        if steps > method.steps
    }
    wrong |= dict.fromkeys(_cut_off(changed, ranges) if ranges else (), "does not have the range of the data")
    if wrong:
        values = {value.name: node for node in nodes for value in (*node.inputs, *node.outputs) if value is not None}
        name, what = next(iter(wrong.items()))
        raise CheckError(
            f"{place_of(values[name]) or name}: what ONNX Runtime wrote for {method} {what}, which rounding does not "
            "explain; nothing was written: keep the module with --keep, or choose another method",
            reason="a quantizer wrote something else",
        )


def _steps_apart(before: Mapping[str, Stored], after: Mapping[str, Stored]) -> dict[str, float]:
    """Products to the most steps that a weight or bias of them is off in another model; infinite if it has none."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, product in before.items():
        names[id(product)].append(name)
    apart = {}
    for same in names.values():
        pairs = [(before[name], after[name]) for name in same if name in after]
        steps = (max(_distance(*pair), _distance(*map(_bias, pair))) for pair in pairs)
        apart[same[0]] = max(steps, default=math.inf)
    return apart


def _cut_off(model: onnx.ModelProto, ranges: Path) -> set[str]:
    """The values that are quantized to less than the ranges that calibration measured, or dequantized otherwise."""
    from onnxruntime.quantization import load_tensors_data

    measured, found = load_tensors_data(ranges), set()
    for node in (node for node in model_of(model).graph if node.op_type == "QuantizeLinear"):
        name = (node.inputs[0] and node.inputs[0].name) or ""
        scale, zero = (
            _constant(ir.convenience.get_const_tensor(value)) if value else None for value in node.inputs[1:3]
        )
        users = [user for user in node.outputs[0].consumers() if user.op_type == "DequantizeLinear"]
        is_wrong = any(user.inputs[1:] != node.inputs[1:] for user in users)
        if scale is None or zero is None:
            found.update([name] if is_wrong else [])
            continue
        for least, most in (
            measured[each].range_value for each in (name, *(user.outputs[0].name for user in users)) if each in measured
        ):
            info, start = np.iinfo(zero.array.dtype), zero.array.astype(np.float32)
            is_wrong |= bool(
                least < (info.min - start - 1) * scale.array or most > (info.max - start + 1) * scale.array
            )
        found.update([name] if is_wrong else [])
    return found


def _bias(product: Stored) -> Stored:
    bias = product.bias or Stored(np.float32(0))
    return Stored(np.ravel(bias.array), np.ravel(bias.step))


def _distance(right: Stored, stored: Stored) -> float:
    if right.array.shape != stored.array.shape and 1 not in (right.array.size, stored.array.size):
        return math.inf
    apart = np.asarray(stored.array - right.array)
    np.abs(apart, out=apart)
    apart -= SUMS_IN_FLOAT32 * max(right.array.max(initial=0), -right.array.min(initial=0))
    with np.errstate(divide="ignore", invalid="ignore"):
        most = float((apart / np.abs(stored.step)).max(initial=0))
    if math.isnan(most):  # 0 / 0, or a bias that is computed in both
        unknown = np.isnan(right.array) & np.isnan(stored.array)
        return 0.0 if ((apart <= 0) | unknown).all() else math.inf
    return most


def _constant(tensor: ir.TensorProtocol | None) -> Stored | None:
    if tensor is None or tensor.dtype == ir.DataType.STRING:
        return None
    array = tensor.numpy()
    if tensor.dtype.is_floating_point():
        step = np.spacing(array).astype(np.float32) if array.dtype.itemsize == 2 else 0.0
        return Stored(array.astype(np.float32, copy=False), step)
    return Stored(array.astype(np.int8) if tensor.dtype.bitwidth < _BYTE else array)


def _result(node: ir.Node, inputs: Sequence[Stored | None]) -> Stored | None:
    """What a node returns, as far as it is a constant or a product with one."""
    first, second, third = inputs[:3]
    if node.op_type in _PRODUCTS:
        return _product(node, inputs)
    if node.op_type == "Constant":
        return _constant(ir.convenience.get_const_tensor(node.outputs[0]))
    if node.op_type == "DequantizeLinear" and first and first.array.dtype.kind in "iu":
        return _dequantized(first, second, third, node.attributes, node.attributes.get_int("axis", 1))
    if node.op_type in _SAME or (node.op_type == "Reshape" and first and not first.is_product):
        return first
    return _sum_or_multiple(node, *((first, second) if first and first.is_product else (second, first)))


def _sum_or_multiple(node: ir.Node, one: Stored | None, other: Stored | None) -> Stored | None:
    """The result of a node that adds a bias to a product, or multiplies one with a constant."""
    if one is None or (other and other.is_product):
        return None
    if node.op_type == "Mul" and other and _fits(other, one):
        return _times(one, other)
    added, bias = other or _COMPUTED, one.bias or Stored(np.float32(0))
    if node.op_type == "Add" and one.is_product and (_fits(added, bias) or _fits(bias, added)):
        return replace(one, bias=Stored(bias.array + added.array, bias.step + added.step))
    return None


def _fits(factor: Stored, other: Stored) -> bool:
    """Whether numbers broadcast to the shape of others."""
    sizes = zip(factor.array.shape[::-1], other.array.shape[::-1], strict=False)
    return factor.array.ndim <= other.array.ndim and all(size in (1, wanted) for size, wanted in sizes)


def _times(stored: Stored, factor: Stored) -> Stored:
    bias = stored.bias and _times(stored.bias, factor)
    step = stored.step * np.abs(factor.array) + np.abs(stored.array) * factor.step
    return replace(stored, array=stored.array * factor.array, step=step, bias=bias)


def _product(node: ir.Node, inputs: Sequence[Stored | None]) -> Stored | None:
    """The weights of a product, one above the other, and its bias."""
    found, places, how = [], _PRODUCTS[node.op_type], node.attributes
    if any(how.get_int(name, 0) for name in _OTHERWISE):
        return None
    for place in places:
        weight, scale, zero = (None if i is None else inputs[i] for i in (place.weight, place.scale, place.zero))
        if weight is None or weight.is_product:
            return None
        axes = (-1, -2) if how.get_int("transB", 0) else place.axes
        if "block_size" in how and scale is not None:
            weight = _unpacked(weight, scale, zero, how)
        else:
            weight = _sample(weight, 1 if axes or not place.weight else 0)
            weight = _dequantized(weight, scale, zero, how, place.channel) if place.zero else weight
        held = weight.array, np.broadcast_to(weight.step, weight.array.shape) if np.ndim(weight.step) else weight.step
        found.append([np.swapaxes(array, *axes) if axes and np.ndim(array) else array for array in held])
    array, step = (np.concatenate(each, -2) if np.ndim(each[0]) else each[0] for each in zip(*found, strict=True))
    bias = None
    if (index := places[0].bias) is not None and index < len(node.inputs) and node.inputs[index] is not None:
        bias = _times(inputs[index] or _COMPUTED, Stored(np.float32(how.get_float("beta", 1.0))))
    factor = how.get_float("alpha", 1.0) if node.op_type in ("Gemm", "FusedMatMul") else 1.0
    product = Stored(array, step, is_product=True)
    return replace(product if factor == 1 else _times(product, Stored(np.float32(factor))), bias=bias)


_OTHERWISE = ("transA", "transBatchA", "transBatchB")
"""Attributes with which no method takes a product."""


def _every(shape: Sequence[int]) -> int:
    """How many places of an axis there are for each that is compared: a block has at least 16."""
    return 15 if len(shape) == 2 and math.prod(shape) > _LARGE else 1


_LARGE = 2**18
"""The most elements of a matrix that are all compared."""


def _sample(weight: Stored, axis: int) -> Stored:
    """Some of the places of the axis of a matrix that a product sums over."""
    places = (slice(None),) * axis + (slice(None, None, _every(weight.array.shape)),)
    step = np.broadcast_to(weight.step, weight.array.shape)[places] if np.ndim(weight.step) else weight.step
    return replace(weight, array=weight.array[places], step=step) if weight.array.ndim > axis else weight


def _dequantized(stored: Stored, scale: Stored | None, zero: Stored | None, how: Any, axis: int) -> Stored:
    """What integers mean, with one scale, one for each place of an axis, or one for each block along it."""
    codes, size = stored.array, how.get_int("block_size", 0)

    def spread(numbers: Any) -> Any:
        if size and numbers.ndim:
            return np.repeat(numbers, size, axis)[tuple(map(slice, codes.shape))]
        if numbers.ndim == 1 and codes.ndim > 1:
            return numbers.reshape([-1, *[1] * (codes.ndim - axis % codes.ndim - 1)])
        return numbers[:, None] if 1 < numbers.ndim < codes.ndim else numbers  # of each direction of an LSTM

    step = np.float32(1) if scale is None else spread(scale.array)
    shift = np.float32(0) if zero is None else spread(zero.array).astype(np.float32)
    return replace(stored, array=(codes - shift) * step, step=step)


def _unpacked(stored: Stored, scale: Stored, zero: Stored | None, how: Any) -> Stored:
    """Rows of a matrix in blocks, whose bytes hold several integers unless they have a type of their own."""
    codes, scales = (numbers.array.reshape(len(stored.array), -1) for numbers in (stored, scale))
    zeros = np.zeros_like(scales) if zero is None else zero.array
    if codes.dtype == np.uint8:
        bits = how.get_int("bits", 4)
        codes = unpack(codes, bits, how.get_int("K", codes.shape[1] * _BYTE // bits))
        zeros = zeros + np.float32(2 ** (bits - 1)) if zero is None else zeros
        zeros = unpack(zeros.reshape(len(codes), -1), bits, scales.shape[1]) if zeros.dtype == np.uint8 else zeros
    places = np.arange(0, codes.shape[1], _every(codes.shape))
    shift, step = (each.reshape(scales.shape)[:, places // how.get_int("block_size", 0)] for each in (zeros, scales))
    codes = codes[:, places] - shift.astype(np.float32)
    if np.ndim(scale.step):  # half of it, of each code, is the rounding of the scale
        rounding = np.abs(scale.step).reshape(scales.shape)[:, places // how.get_int("block_size", 0)]
        return Stored(codes * step, np.abs(step) + np.abs(codes) * rounding)
    return Stored(codes * step, step)

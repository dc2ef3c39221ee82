"""Compares what a quantizer wrote with the floating-point model, by what both compute from the same inputs.

Inputs with a single number give the elements of a product's weight, in whatever form it is written. Each result may be
off by what it changes when weights and inputs move by half of a step, which is the most that rounding moves them.
Initializers of other nodes, and of operators that compute several products, are compared themselves.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.errors import CheckError, UsageError
from modelexport.graph.bound_tensors import share_tensor
from modelexport.graph.copies import copy_of, value_like
from modelexport.graph.node_owners import place_of
from modelexport.graph.operator_kinds import RECURRENT
from modelexport.graph.weighted_operators import data_of, result_axes, row_of, summed_axis
from modelexport.regions.region import Region, weights_of
from modelexport.runtime.saturating_products import unsigned_copy
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tools.quantize.equal_method_groups import weighted_nodes
from modelexport.tools.quantize.methods import Method, Ranges, has_channels
from modelexport.tools.quantize.weights_behind import same_nodes, same_tensors
from modelexport.traces.tolerances import OF_BIASES, TIMES_MOVED

_TOGETHER = 16
"""The neighbouring errors that one norm is taken of; a block of weights with one scale has at least as many."""
_EVERY = 15
"""Of the indices that a large weight sums over, one run of ``_TOGETHER`` in ``_EVERY`` such runs is compared."""
_COMPARED_WHOLE = 2**18
"""The most elements of a weight of which all indices are compared."""
_ACTIVATIONS = 63
"""The positive integers of the narrowest type that activations are stored in, of 7 bits."""
_STATES = dict.fromkeys(RECURRENT, slice(4, 7)) | {"Attention": slice(3, None)}
"""Operators that compute several products, to the optional inputs that are left out. They get dense inputs."""
_IN_RANGES = ("Relu", "Clip")
"""Operators that quantizers drop, because the integers' range cuts values as well; the product gets their name."""


def check_written(
    nodes: Sequence[ir.Node],
    method: Method,
    before: ir.Model,
    changed: ir.Model,
    ranges: Ranges | None = None,
) -> None:
    """Refuse products that are off by more than a method rounds, and values whose scales do not hold their range.

    Args:
        nodes: What was quantized.
        before: A model of these nodes.
        changed: That model after the quantizer.
        ranges: What calibration measured, if the method needs it.
    """
    for name, what in _Comparison(method, before, changed, ranges).differences():
        values = {value.name: node for node in nodes for value in (*node.inputs, *node.outputs) if value is not None}
        raise CheckError(
            f"{place_of(values[name]) or name}: what ONNX Runtime wrote for {method} {what}; nothing was written: keep "
            "the module with --keep NAME, or choose another method",
            reason="a quantizer wrote something else",
        )


class _Comparison:
    """A floating-point model and the quantized one made of it, in which corresponding values have the same name."""

    def __init__(self, method: Method, before: ir.Model, after: ir.Model, ranges: Ranges | None) -> None:
        self._method, self._before, self._after = method, before, after
        self._there = {value.name: value for node in after.graph for value in node.outputs}
        self._there |= {value.name: value for value in after.graph.inputs}
        self._measured = ranges or {}
        self._draw = np.random.default_rng(0)

    def differences(self) -> Iterator[tuple[str, str]]:
        """The names of results that quantization does not explain, and what is wrong with them."""
        compared: set[ir.Node] = set()
        products = weighted_nodes(self._before)
        for node in products:
            value = next(each for each in node.outputs if each.name)
            ends = [value, *(user.outputs[0] for user in value.consumers() if user.op_type in _IN_RANGES)]
            if (end := next((each for each in ends if each.name in self._there), None)) is None:
                continue  # it is inside of what is compared with another product
            target, region = self._there[end.name], Region.between([end], partial(self._is_inside, end))
            compared.update(region.nodes)
            if (maker := target.producer()) is None or not same_nodes(node, maker):
                try:
                    steps = self._steps_off(region, target, products)
                except (UsageError, ValueError) as error:
                    yield value.name or "", f"cannot be compared with the floating-point model ({error})"
                else:
                    if not steps <= TIMES_MOVED:  # it may be no number
                        yield value.name or "", f"is off by {steps:.3g} times what rounding explains"
        for node in products:
            if node not in compared:
                yield node.outputs[0].name or "", "has no value to compare with the floating-point model"
        by_element = {node for node in compared if node.op_type not in _STATES}
        for value in self._before.graph.initializers.values():
            if by_element.isdisjoint(value.consumers()) and not self._is_stored(value):
                yield value.name or "", "has other numbers than the floating-point model"
        for node in self._after.graph:
            if node.op_type == "QuantizeLinear" and node.inputs[0] is not None:
                yield from self._cut_off(node, node.inputs[0])

    def _is_stored(self, value: ir.Value) -> bool:
        """Whether the quantized model has the numbers of an initializer, bit by bit or within half of a step.

        Also if nothing takes them any more, as the bounds of a ``Clip`` that the quantizer left to a range of integers.
        """
        held = {name: each.const_value for name, each in self._after.graph.initializers.items()}
        tensor, codes = value.const_value, f"{value.name}_quantized"
        if value.name in held:
            return same_tensors(held[value.name], tensor)
        prefix = value.name if f"{value.name}_scale" in held else codes  # the latter of what is stored as int32
        stored = [held.get(name) for name in (codes, f"{prefix}_scale", f"{prefix}_zero_point")]
        if stored[0] is None or tensor is None:
            return True
        numbers, step, zero = (np.float64(0) if each is None else each.numpy().astype(np.float64) for each in stored)
        right, along = tensor.numpy().astype(np.float64), (*numbers.shape[:-2], 1, -1)
        if any(user.op_type in RECURRENT for user in value.consumers()):
            right = np.swapaxes(right, -1, -2)
        step, zero = (each.reshape(along) if each.size > 1 else each for each in (step, zero))
        return bool((np.abs((numbers - zero) * step - right) <= step / 2 * TIMES_MOVED).all())

    def _is_inside(self, result: ir.Value, value: ir.Value) -> bool:
        """Whether a value has to be computed to compare a result: the quantized model does not have it."""
        return value is result or value.name not in self._there

    @np.errstate(over="ignore", invalid="ignore")  # what is not finite is refused
    def _steps_off(self, region: Region, target: ir.Value, products: Collection[ir.Node]) -> float:
        """The largest error of a quantized result, as a multiple of the change that rounding explains."""
        inside = [node for node in region.nodes if node in products]
        fed = [node for node in inside if data_of(node) in region.inputs]
        first = (fed or inside)[0]
        data = data_of(first)
        assert data.dtype is not None
        low, high = self._range(data)
        feeds = _feeds(first, low, high, self._draw) if fed else np.zeros(0)  # a constant needs none
        rank = len(data.shape) if data.shape is not None else 0
        feeds = moved = feeds.reshape((1,) * (rank - feeds.ndim) + feeds.shape)
        if fed and data.dtype.is_floating_point():
            scales = [_scale(user) for user in self._there[data.name].consumers() if user.op_type == "QuantizeLinear"]
            step = max([*scales, self._step_of(high - low)])
            moved = feeds + self._moves(feeds, step) * (feeds != 0)
        end, target = target, _before_rounding(target)
        names, maker = {value.name for value in region.inputs}, target.producer()
        written = Region.between([target], lambda value: value.producer() is not None and value.name not in names)
        states = {value.name for node in inside for value in node.inputs[_STATES.get(node.op_type, slice(0))] if value}
        right, moved, made, *others = (
            result
            for model, part, arrays, weights in (
                (self._before, region, (feeds, moved), {}),
                (self._after, written, (feeds,), {}),
                *((self._before, region, (feeds,), self._moved(node, written)) for node in inside),
            )
            for result in _computed(model, part, data, [a.astype(data.dtype.numpy()) for a in arrays], weights, states)
        )
        near = [moved, *others]
        if made.shape != right.shape:
            raise ValueError(f"the shape of a result is {made.shape} instead of {right.shape}")
        rounding = np.spacing((region.outputs[0].dtype or ir.DataType.FLOAT).numpy().type(2))
        slack = float(rounding) * float(np.abs(right).max(initial=0)) + float(np.finfo(np.float32).tiny)
        one_by_one = fed and not _rows(first) and first.op_type not in _STATES
        channels = (1 if first.op_type.startswith("Conv") else -1) if one_by_one else None
        step = 0.0
        if self._measured:  # less than a step of what is stored is lost in any case, as of a bias without weights
            users = [*target.consumers()] if maker is None or maker.op_type != "DequantizeLinear" else [maker]
            stored = [each for each in users if each.op_type in ("QuantizeLinear", "DequantizeLinear")]
            step = max(map(_scale, stored), default=0.0)
            if stored == users:  # also what a Relu or Clip does, if it is left to the range of integers
                right, made, *near = (np.clip(each, *self._range(end)) for each in (right, made, *near))
        moves = [each - right for each in near]
        error = made - right
        if not all(np.isfinite(each).all() for each in (slack + step, error, *moves)):
            raise ValueError("weights or data are so large that results are not finite")
        largest = _largest_error(error, moves, slack + step, channels)
        if step and one_by_one and data.dtype.is_floating_point():  # errors of weights add up to one of the step
            weight = _weights(first)[0].const_value
            assert weight is not None
            shape = weight.shape.numpy()
            summed = math.prod(shape) // math.prod(shape[axis] for axis in result_axes(first))
            of_bias = np.take(error, [-1], 0 if channels == 1 else -2)  # the last input is zeros
            largest = max(largest, _largest_error(error - of_bias, moves, slack + step / summed, channels))
        return largest

    def _step_of(self, reach: float) -> float:
        """The step between two stored activations whose range has the length ``reach``."""
        return reach / (2 * max(self._method.levels, _ACTIVATIONS) + 1)

    def _moved(self, node: ir.Node, written: Region) -> dict[ir.Value, ir.Value]:
        """The weights of a node with each element half of a step away, up or down."""
        has_one_scale = any(each.op_type == "ConvInteger" for each in written.nodes)  # ONNX Runtime's takes one
        moved, weights = {}, _weights(node)
        for value in dict.fromkeys((*weights, data_of(node))):
            if value.const_value is None or not value.const_value.dtype.is_floating_point():
                continue  # what it multiplies is mostly no constant
            array = value.const_value.numpy()
            wide, sizes = array.astype(np.float32), np.abs(array).astype(np.float32)
            by_channel = not has_one_scale and all(
                has_channels(user.op_type, place, wide.ndim) for user, place in value.uses()
            )
            step = self._step(node, sizes, by_channel) if value in weights else self._step_of(2 * sizes.max())
            wide += self._moves(wide, step)
            moved[value] = value_like(value, tensor=ir.tensor(wide.astype(array.dtype)))
        return moved

    def _moves(self, array: Any, step: Any) -> Any:
        return (self._draw.integers(0, 2, array.shape, dtype=np.int8) - np.float32(0.5)) * step

    def _step(self, node: ir.Node, sizes: Any, by_channel: bool) -> Any:
        """The step between two stored elements of a weight, from their magnitudes; it broadcasts with the weight."""
        if "block" in self._method.row.options:
            axis, block = summed_axis(node), self._method.option("block")
            most = np.maximum.reduceat(sizes, np.arange(0, sizes.shape[axis], block), axis)
            most = np.repeat(most, block, axis).take(np.arange(sizes.shape[axis]), axis)
            # Of the largest numbers of both signs, symmetric integers have those of one.
            beyond = np.maximum(sizes - most * np.float32(self._method.levels / (self._method.levels + 1)), 0)
            return most / np.float32(self._method.levels) + 2 * beyond
        if not (by_channel and self._method.option("per_channel")):
            sizes = sizes.max()
        else:
            kept = {axis % sizes.ndim for axis in result_axes(node)}
            sizes = sizes.max(tuple({*range(sizes.ndim)} - kept), keepdims=True)
        return sizes / np.float32(self._method.levels)

    def _range(self, value: ir.Value) -> tuple[float, float]:
        """The range of a value as calibration measured it, extended to include zero."""
        if value.name not in self._measured:
            return 0.0, 1.0
        least, most = self._measured[value.name].range_value
        low, high = min(float(np.min(least)), 0.0), max(float(np.max(most)), 0.0)
        return (low, high) if low < high else (0.0, 1.0)  # of zeros alone, the scale is 1

    def _cut_off(self, node: ir.Node, value: ir.Value) -> Iterator[tuple[str, str]]:
        """What is wrong with the scale of a value: quantizing and dequantizing has to keep both ends of its range."""
        for back in (user for user in node.outputs[0].consumers() if user.op_type == "DequantizeLinear"):
            region = Region.between(back.outputs, lambda each: each is not value)
            for name in sorted({value.name or "", back.outputs[0].name or ""} & {*self._measured}):
                ends = np.array(self._range(self._there[name]), np.float32)
                [back_again] = _computed(self._after, region, value, [ends])
                if not (np.abs(back_again - ends) <= _scale(node)).all():
                    yield name, "does not have the range of the data"


def _scale(node: ir.Node) -> Any:
    """The scale of a node that quantizes, if it is constant."""
    tensor = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] is not None else None
    return np.inf if tensor is None else tensor.numpy()


def _before_rounding(value: ir.Value) -> ir.Value:
    """The value from which this one was quantized and dequantized; itself if it was not."""
    before = value
    for operator in ("DequantizeLinear", "QuantizeLinear"):
        maker = before.producer()
        if maker is None or maker.op_type != operator or maker.inputs[0] is None:
            return value
        before = maker.inputs[0]
    return before


def _weights(node: ir.Node) -> Sequence[ir.Value]:
    """The weights of a node that are quantized."""
    row = row_of(node)
    place = 1 if row is None else row.weight
    return [value for value in node.inputs[place : place + 1 + (node.op_type in RECURRENT)] if value is not None]


def _rows(node: ir.Node) -> int:
    """The rows of the bias of a ``Gemm`` if they differ; 0 if it has one for all rows."""
    bias = node.inputs[2] if node.op_type == "Gemm" and len(node.inputs) > 2 else None
    shape = bias.shape.numpy() if bias is not None and bias.shape is not None and bias.shape.is_static() else ()
    return int(shape[0]) if len(shape) == 2 and shape[0] > 1 else 0


def _feeds(node: ir.Node, low: float, high: float, draw: np.random.Generator) -> Any:
    """Inputs with one number that is not zero, so that the results of a product are elements of its weight. The last
    input is zero, so that its result is the bias.
    """
    weight, how = _weights(node)[0], node.attributes
    assert weight.const_value is not None
    shape = weight.const_value.shape.numpy()

    def places(count: int) -> Any:
        """The indices of an axis that are compared."""
        every = np.arange(count)
        return every if math.prod(shape) <= _COMPARED_WHOLE else every[every % (_TOGETHER * _EVERY) < _TOGETHER]

    if node.op_type == "Gather":
        return places(shape[how.get_int("axis", 0)])
    size, spread = shape[summed_axis(node)], list[int]()
    if node.op_type in _STATES:
        return draw.choice(np.array([low, high], np.float32), (2, _TOGETHER, size))
    if node.op_type.startswith("Conv"):
        size *= how.get_int("group", 1) if node.op_type == "Conv" else 1
        dilations = how.get_ints("dilations", [1] * len(shape[2:]))
        spread = [1 + (length - 1) * step for length, step in zip(shape[2:], dilations, strict=True)]
    if rows := _rows(node):
        feeds = draw.choice(np.array([low, high], np.float32), (rows, size))
        return feeds.T if how.get_int("transA", 0) else feeds
    at = places(size)
    feeds = np.zeros((len(at) + 1, size, *(2 * length for length in spread)), np.float32)
    values = np.where(np.arange(len(at)) % 2, high or low, low or high)
    feeds[np.arange(len(at)), at, *(draw.integers(length - 1, 2 * length, len(at)) for length in spread)] = values
    return feeds.T if how.get_int("transA", 0) else feeds


def _computed(
    source: ir.Model,
    region: Region,
    data: ir.Value,
    arrays: Sequence[Any],
    weights: Mapping[ir.Value, ir.Value] = MappingProxyType({}),
    without: Collection[str | None] = (),
) -> Iterator[Any]:
    """The results of a region of a model for inputs. Its other inputs are zero, or left out if they are optional."""
    nodes = [node for node in source.graph if node in region.nodes]
    taken = [*region.inputs, *weights_of(nodes)]
    graph = copy_of(ir.GraphView(taken, region.outputs, nodes=nodes, opset_imports=source.opset_imports))
    others = {}
    for value in (value for node in graph for value in node.outputs):
        value.shape = None
    for value, copied in zip(taken, list(graph.inputs), strict=True):
        if value.name in without:
            for user, place in [*copied.uses()]:
                user.replace_input_with(place, None)
            graph.inputs.remove(copied)
        elif value.is_initializer():
            graph.inputs.remove(copied)
            share_tensor(copied, weights.get(value, value))
            graph.register_initializer(copied)
        else:
            copied.shape, copied.type = None, ir.TensorType(ir.DataType.from_numpy(arrays[0].dtype))
            others[copied.name or ""] = np.zeros(1, arrays[0].dtype)
            for user, place in [*copied.uses()]:
                if user.op_type.startswith("Conv") and place == 2:  # the bias has to have all channels
                    user.replace_input_with(place, None)
    model = ir.Model(graph, ir_version=source.ir_version)
    session = open_session(unsigned_copy(model) or model)
    for array in arrays:
        given = {data.name or "": array} if data.name in {value.name for value in region.inputs} else {}
        [result] = run_session(session, others | given).values()
        yield result.astype(np.float32)


def _largest_error(error: Any, moves: Sequence[Any], slack: float, channels: int | None) -> float:
    """The largest norm of neighbouring errors of a channel, as a multiple of the norm that rounding explains.

    Args:
        slack: What is allowed of each error in addition.
        channels: The axis of the channels; ``None`` for one norm of all errors.
    """

    def norms(apart: Any) -> Any:
        rows = apart.reshape(-1, 1) if channels is None else np.moveaxis(apart, channels, -1)
        rows = np.square(rows.reshape(-1, rows.shape[-1]))
        starts = np.arange(0, 1 if channels is None else max(1, len(rows) - _TOGETHER + 1), _TOGETHER)
        return np.sqrt(np.add.reduceat(rows, starts))

    largest = max(float(np.abs(each).max(initial=0)) for each in moves)
    slack += largest * OF_BIASES
    unit = np.float32(max(largest, slack))  # so that squares are numbers of float32, too
    explained = sum(norms(each / unit) for each in (*moves, np.full_like(error, slack)))
    return float((norms(error / unit) / explained).max(initial=0))

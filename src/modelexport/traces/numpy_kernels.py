"""Kernels in NumPy for operators that onnx's reference evaluator lacks, or computes element by element.

Each is the operator of the standard, for any floating-point type. All others are onnx's own (``onnx.reference.ops``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_cum_sum import CumSum as ScalarCumSum
from onnx.reference.ops.op_gru import GRU as GRU_14
from onnx.reference.ops.op_lstm import LSTM as LSTM_14
from onnx.reference.ops.op_quantize_linear import QuantizeLinear_21
from onnx.reference.ops.op_rnn import RNN_14
from onnx.reference.ops.op_split import Split_18

from modelexport.traces.numpy_normalizations import (
    LRN,
    BatchNormalization,
    GroupNormalization,
    LogSoftmax,
    MeanVarianceNormalization,
    Softmax,
    SoftmaxCrossEntropyLoss,
)
from modelexport.traces.numpy_sampling import GridSample, Resize


class Gelu(OpRun):
    def _run(self, x: Any, approximate: str = "none") -> tuple[Any, ...]:
        if approximate == "tanh":
            return (x * (0.5 + 0.5 * np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))),)
        return (x * (0.5 + 0.5 * erf(x * math.sqrt(0.5))),)


class CumSum(ScalarCumSum):
    """``CumSum`` that also takes its axis as an array of one element, which exporters write and runtimes accept."""

    def _run(self, x: Any, axis: Any, exclusive: Any = None, reverse: Any = None) -> tuple[Any, ...]:
        return super()._run(x, axis.reshape(()), exclusive, reverse)


class _WithLengths:
    """A recurrent layer that runs over each sequence as far as its length says; onnx runs over all of it."""

    def _run(self, x: Any, *others: Any, **how: Any) -> tuple[Any, ...]:
        lengths = others[3] if len(others) > 3 else None
        if lengths is None or how.get("layout"):
            return self._over_all(x, *others, **how)
        results = []
        for row, length in enumerate(lengths):
            states = [None if state is None else state[:, row : row + 1] for state in others[4:6]]
            y, *last = self._over_all(x[:length, row : row + 1], *others[:3], None, *states, *others[6:], **how)
            results.append((np.pad(y, [(0, len(x) - length), (0, 0), (0, 0), (0, 0)]), *last))
        return tuple(np.concatenate(rows, axis=-2) for rows in zip(*results, strict=True))

    def _over_all(self, *inputs: Any, **how: Any) -> tuple[Any, ...]:
        return super()._run(*inputs, **how)  # type: ignore[misc]  # of the class beside it


class LSTM(_WithLengths, LSTM_14):
    pass


class GRU(_WithLengths, GRU_14):
    pass


class RNN(_WithLengths, RNN_14):
    """``RNN`` with the activation Relu, which onnx's reference evaluator lacks."""

    def choose_act(self, name: Any, alpha: Any, beta: Any) -> Any:
        if name == "Relu":
            return lambda x: np.maximum(x, 0)
        return super().choose_act(name, alpha, beta)


class ReduceLogSumExp(OpRun):
    def _run(self, x: Any, axes: Any = None, keepdims: int = 1, noop_with_empty_axes: int = 0) -> tuple[Any, ...]:
        along: Any = () if noop_with_empty_axes else None
        along = along if axes is None or not len(axes) else tuple(axes)
        return (np.logaddexp.reduce(x, along, None, None, bool(keepdims)),)  # type: ignore[call-overload]  # any bool


def without_last_bits(x: Any, where: Callable[..., Any] = np.where) -> Any:
    """Numbers in float64, rounded to 22 bits, before an integer is made of them; whole numbers as they are.

    A model in float32 has an integer there, or half of one, where its numbers are in float64 off by the rounding of a
    constant. In two runs that add in another order, the same integer is made of them.

    Args:
        where: The function of this name of the library whose array ``x`` is.
    """
    large = x * (2.0**31 + 1)
    return where(x == x.round(), x, large - (large - x))


def makes_whole_numbers(op_type: str, result: ir.DataType | None) -> bool:
    """Whether an operator converts or rounds numbers to integers, and takes them :func:`without_last_bits`.

    Args:
        result: The type of its result.
    """
    return op_type in ("Ceil", "Floor", "Round") or (op_type == "Cast" and result is not None and result.is_integer())


class QuantizeLinear(QuantizeLinear_21):
    def _run(
        self, x: Any, scale: Any, zero_point: Any = None, axis: int = 1, block_size: int = 0, **how: Any
    ) -> tuple[Any, ...]:
        if x.dtype == np.float64 and scale.ndim < 2:
            sizes = [-1, *[1] * (x.ndim - axis % x.ndim - 1)] if scale.ndim and x.ndim else []
            x, scale = without_last_bits(x / scale.reshape(sizes)), np.array(1.0)
        wanted = {name: how[name] for name in ("saturate", "output_dtype") if name in how}
        return super()._run(x, scale, zero_point, axis=axis, block_size=block_size, **wanted)


class GlobalLpPool(OpRun):
    def _run(self, x: Any, p: int = 2) -> tuple[Any, ...]:
        return ((np.abs(x) ** p).sum(tuple(range(2, x.ndim)), keepdims=True) ** (1 / p),)


class GlobalMaxPool(OpRun):
    def _run(self, x: Any) -> tuple[Any, ...]:
        return (x.max(tuple(range(2, x.ndim)), keepdims=True),)


class Split(Split_18):
    def _run(self, x: Any, split: Any = None, **how: Any) -> tuple[Any, ...]:
        # onnx shortens the last part, or the tensor, and takes parts of less than nothing
        if split is not None and (sum(split) != x.shape[how["axis"]] or min(split) < 0):
            raise ValueError(f"Split: parts of {list(split)} elements do not add up to {x.shape[how['axis']]}")
        return super()._run(x, split, **how)


class GatherND(OpRun):
    def _run(self, data: Any, indices: Any, batch_dims: int = 0) -> tuple[Any, ...]:
        around = np.indices(indices.shape[:-1], sparse=True)[:batch_dims]
        return (data[(*around, *np.moveaxis(indices, -1, 0))],)


class ScatterND(OpRun):
    def _run(self, data: Any, indices: Any, updates: Any, reduction: str = "none") -> tuple[Any, ...]:
        result = data.copy()
        _write(result, tuple(np.moveaxis(indices, -1, 0)), updates, reduction)
        return (result,)


class GatherElements(OpRun):
    def _run(self, data: Any, indices: Any, axis: int = 0) -> tuple[Any, ...]:
        return (data[_along(indices, axis)],)


class ScatterElements(OpRun):
    def _run(self, data: Any, indices: Any, updates: Any, axis: int = 0, reduction: str = "none") -> tuple[Any, ...]:
        result = data.copy()
        _write(result, _along(indices, axis), updates, reduction)
        return (result,)


def _along(indices: Any, axis: int) -> tuple[Any, ...]:
    """The places in an array that indices along one axis name."""
    places = list(np.indices(indices.shape, sparse=True))
    places[axis] = indices
    return tuple(places)


_WRITES = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _write(result: Any, places: tuple[Any, ...], updates: Any, reduction: str) -> None:
    if reduction in _WRITES:
        _WRITES[reduction].at(result, places, updates)
    else:
        result[places] = updates


class Conv(OpRun):
    def _run(self, x: Any, w: Any, b: Any = None, group: int = 1, **how: Any) -> tuple[Any, ...]:
        windows = _Windows(x.shape[2:], **how | {"kernel_shape": w.shape[2:]})
        grouped = windows.padded(x, 0).reshape(x.shape[0], group, x.shape[1] // group, *windows.padded_sizes)
        kernels = w.reshape(group, w.shape[0] // group, *w.shape[1:])
        result = np.zeros((x.shape[0], group, kernels.shape[1], math.prod(windows.sizes)), np.result_type(x, w))
        for offset, seen in windows:
            part = grouped[(..., *seen)].reshape(*grouped.shape[:3], result.shape[-1])
            result += kernels[(slice(None),) * 3 + offset] @ part
        result = result.reshape(x.shape[0], w.shape[0], *windows.sizes)
        return (result if b is None else result + b.reshape(-1, *[1] * len(windows.sizes)),)


class ConvTranspose(OpRun):
    def _run(
        self,
        x: Any,
        w: Any,
        b: Any = None,
        auto_pad: str = "NOTSET",
        dilations: Any = None,
        group: int = 1,
        output_padding: Any = None,
        output_shape: Any = None,
        pads: Any = None,
        strides: Any = None,
        **how: Any,
    ) -> tuple[Any, ...]:
        n = x.ndim - 2
        steps, apart, more = list(strides or [1] * n), list(dilations or [1] * n), list(output_padding or [0] * n)
        whole = [
            (size - 1) * step + (k - 1) * gap + 1 + extra
            for size, step, k, gap, extra in zip(x.shape[2:], steps, w.shape[2:], apart, more, strict=True)
        ]
        if output_shape or auto_pad.startswith("SAME"):
            sizes = list(output_shape or [size * step for size, step in zip(x.shape[2:], steps, strict=True)])[-n:]
            total = [have - want for have, want in zip(whole, sizes, strict=True)]
            before = [padding // 2 if auto_pad == "SAME_UPPER" else padding - padding // 2 for padding in total]
        else:
            before = list(pads or [0] * 2 * n)[:n]
            total = [a + b for a, b in zip(before, list(pads or [0] * 2 * n)[n:], strict=True)]
        grouped = x.reshape(x.shape[0], group, x.shape[1] // group, math.prod(x.shape[2:]))
        kernels = w.reshape(group, -1, *w.shape[1:])
        result = np.zeros((x.shape[0], group, w.shape[1], *whole), np.result_type(x, w))
        for offset in product(*map(range, w.shape[2:])):
            part = kernels[(slice(None),) * 3 + offset].swapaxes(1, 2) @ grouped
            starts = [k * gap for k, gap in zip(offset, apart, strict=True)]
            seen: list[Any] = [
                slice(start, start + (size - 1) * step + 1, step)
                for start, size, step in zip(starts, x.shape[2:], steps, strict=True)
            ]
            result[(..., *seen)] += part.reshape(*result.shape[:3], *x.shape[2:])
        kept: list[Any] = [slice(a, a + have - cut) for a, have, cut in zip(before, whole, total, strict=True)]
        result = result.reshape(x.shape[0], group * w.shape[1], *whole)[(..., *kept)]
        return (result if b is None else result + b.reshape(-1, *[1] * n),)


class MaxPool(OpRun):
    def _run(self, x: Any, storage_order: int = 0, **how: Any) -> tuple[Any, ...]:
        windows = _Windows(x.shape[2:], **how)
        lowest = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
        padded = windows.padded(x, lowest)
        places = np.arange(x.size).reshape(x.shape)
        if storage_order:  # columns first
            places = places.reshape(*x.shape[:2], *x.shape[:1:-1]).transpose(0, 1, *range(x.ndim - 1, 1, -1))
        where = windows.padded(places, 0)
        result: Any = None
        indices: Any = None
        for _, seen in windows:
            part, there = padded[(..., *seen)], where[(..., *seen)]
            if result is None:
                result, indices = part.copy(), there.copy()
            else:
                larger = part > result
                result[larger], indices[larger] = part[larger], there[larger]
                if x.dtype.kind == "f":
                    result[np.isnan(part)] = np.nan
        return (result, indices)[: max(1, len(self.onnx_node.output))]


class AveragePool(OpRun):
    def _run(self, x: Any, count_include_pad: int = 0, **how: Any) -> tuple[Any, ...]:
        windows = _Windows(x.shape[2:], **how)
        inside = windows.padded(np.ones((1, 1, *x.shape[2:])), 0, explicit=float(bool(count_include_pad)))
        padded = windows.padded(x, 0)
        total = sum(padded[(..., *seen)] for _, seen in windows)
        count = sum(inside[(..., *seen)] for _, seen in windows)
        with np.errstate(all="ignore"):
            return ((total / count).astype(x.dtype),)


class LpPool(OpRun):
    def _run(self, x: Any, p: int = 2, **how: Any) -> tuple[Any, ...]:
        windows = _Windows(x.shape[2:], **how)
        padded = np.abs(windows.padded(x, 0)) ** p
        return ((sum(padded[(..., *seen)] for _, seen in windows) ** (1 / p)).astype(x.dtype),)


class _Windows:
    """The windows of a convolution or a pool, one offset inside the kernel after the other."""

    def __init__(
        self,
        sizes: Sequence[int],
        kernel_shape: Sequence[int],
        strides: Sequence[int] | None = None,
        dilations: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        auto_pad: str = "NOTSET",
        ceil_mode: int = 0,
    ) -> None:
        n = len(sizes)
        self._kernel = list(kernel_shape)
        self._strides, self._dilations = list(strides or [1] * n), list(dilations or [1] * n)
        spans = [(k - 1) * apart + 1 for k, apart in zip(self._kernel, self._dilations, strict=True)]
        if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            steps = zip(sizes, spans, self._strides, strict=True)
            totals = [max(0, (-(-size // step) - 1) * step + span - size) for size, span, step in steps]
            less, more = [total // 2 for total in totals], [total - total // 2 for total in totals]
            before, after = (less, more) if auto_pad == "SAME_UPPER" else (more, less)
        else:
            padding = list(pads or [0] * 2 * n)
            before, after = padding[:n], padding[n:]
        self._pads = list(zip(before, after, strict=True))
        rooms = [size + a + b - span for size, (a, b), span in zip(sizes, self._pads, spans, strict=True)]
        self.sizes = [
            (-(-room // step) if ceil_mode else room // step) + 1
            for room, step in zip(rooms, self._strides, strict=True)
        ]
        if ceil_mode:  # a window that would begin in the padding at the end is left out
            self.sizes = [
                out - ((out - 1) * step >= size + a)
                for out, step, size, (a, _) in zip(self.sizes, self._strides, sizes, self._pads, strict=True)
            ]
        reach = [(out - 1) * step + span for out, step, span in zip(self.sizes, self._strides, spans, strict=True)]
        self.padded_sizes = [max(size + a + b, end) for size, (a, b), end in zip(sizes, self._pads, reach, strict=True)]

    def padded(self, x: Any, value: float, *, explicit: float | None = None) -> Any:
        """An array with the padding that the operator asks for, and what windows reach beyond that.

        Args:
            value: The value of the padding.
            explicit: That of the padding that the attributes name, if it is another.
        """
        around = [(0, 0)] * (x.ndim - len(self._pads))
        shape = x.shape[x.ndim - len(self._pads) :]
        result = np.pad(x, [*around, *self._pads], constant_values=value if explicit is None else explicit)
        beyond = [
            (0, wanted - size - a - b)
            for wanted, size, (a, b) in zip(self.padded_sizes, shape, self._pads, strict=True)
        ]
        return np.pad(result, [*around, *beyond], constant_values=value) if any(b for _, b in beyond) else result

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        for offset in product(*map(range, self._kernel)):
            starts = [k * apart for k, apart in zip(offset, self._dilations, strict=True)]
            seen = zip(starts, self.sizes, self._strides, strict=True)
            yield offset, tuple(slice(start, start + (size - 1) * step + 1, step) for start, size, step in seen)


def erf(x: Any) -> Any:
    """The error function, which NumPy does not have."""
    return np.fromiter(map(math.erf, x.reshape(-1).tolist()), np.float64, x.size).reshape(x.shape).astype(x.dtype)


def by_element(name: str, function: Callable[[Any], Any]) -> type[OpRun]:
    """The kernel of an operator without attributes that is a function of each element."""
    return type(name, (OpRun,), {"_run": lambda self, x: (function(x),)})


HardSwish = by_element("HardSwish", lambda x: x * np.clip(x / 6 + 0.5, 0, 1))
Mish = by_element("Mish", lambda x: x * np.tanh(np.logaddexp(x, 0)))
Softplus = by_element("Softplus", lambda x: np.logaddexp(x, 0))

KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        AveragePool, BatchNormalization, Conv, ConvTranspose, CumSum, by_element("Erf", erf), GatherElements, GatherND,
        Gelu, GlobalLpPool, GlobalMaxPool, GridSample, GroupNormalization, GRU, HardSwish, LogSoftmax, LpPool, LRN,
        LSTM, MaxPool, MeanVarianceNormalization, Mish, QuantizeLinear, ReduceLogSumExp, Resize, RNN,
        ScatterElements, ScatterND, Softmax, SoftmaxCrossEntropyLoss, Softplus, Split,
    )
}  # fmt: skip
"""The kernels of this file by the names of their operators, in the standard domain."""

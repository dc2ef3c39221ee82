"""Kernels in NumPy for normalizations and softmaxes, of any version of the standard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_batch_normalization import BatchNormalization_14


class BatchNormalization(BatchNormalization_14):
    """``BatchNormalization`` of inference unless training is asked for; onnx takes any before opset 14 for training."""

    def _run(self, *inputs: Any, training_mode: int = 0, **how: Any) -> tuple[Any, ...]:
        numbers = how["epsilon"], how["momentum"]
        return super()._run(*inputs, *numbers, training_mode)


class LRN(OpRun):
    def _run(self, x: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> tuple[Any, ...]:
        around = [((size - 1) // 2, size // 2) if axis == 1 else (0, 0) for axis in range(x.ndim)]
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(x * x, around), size, axis=1)
        return (x / (bias + alpha / size * windows.sum(-1)) ** beta,)


class Softmax(OpRun):
    def _run(self, x: Any, axis: int) -> tuple[Any, ...]:
        return (np.exp(log_softmax(x, self.axes(axis, x.ndim))),)

    def axes(self, axis: int, rank: int) -> tuple[int, ...]:
        """The axes that it normalizes over: before opset 13 all from one on."""
        return (axis,) if self.run_params["opsets"].get("", 1) > 12 else tuple(range(rank)[axis:])


class LogSoftmax(Softmax):
    def _run(self, x: Any, axis: int) -> tuple[Any, ...]:
        return (log_softmax(x, self.axes(axis, x.ndim)),)


class SoftmaxCrossEntropyLoss(OpRun):
    def _run(self, x: Any, target: Any, weight: Any = None, ignore_index: Any = None, reduction: Any = None) -> Any:
        logarithms, counts = log_softmax(x, 1), target != ignore_index
        classes = np.where(counts, target, 0)
        weights = np.where(counts, 1 if weight is None else weight[classes], 0).astype(x.dtype)
        loss = np.where(counts, -np.take_along_axis(logarithms, classes[:, None], 1)[:, 0] * weights, 0)
        if reduction != "none":
            loss = np.asarray(loss.sum() / (weights.sum() if reduction == "mean" else 1))
        return (loss, logarithms)[: len(self.onnx_node.output)]


class GroupNormalization(OpRun):
    def _run(
        self, x: Any, scale: Any, bias: Any, epsilon: float = 1e-5, num_groups: int = 1, stash_type: int = 1
    ) -> tuple[Any, ...]:
        grouped = x.reshape(x.shape[0], num_groups, -1)
        mean, variance = grouped.mean(-1, keepdims=True), grouped.var(-1, keepdims=True)
        normal = ((grouped - mean) / np.sqrt(variance + epsilon)).reshape(x.shape)
        each = x.shape[1] // len(scale)  # before opset 21 a scale belongs to a group
        per_channel = (1, -1, *[1] * (x.ndim - 2))
        scale, bias = (np.repeat(factors, each).reshape(per_channel) for factors in (scale, bias))
        return ((normal * scale + bias).astype(x.dtype),)


class MeanVarianceNormalization(OpRun):
    def _run(self, x: Any, axes: Sequence[int] = (0, 2, 3)) -> tuple[Any, ...]:
        axes = tuple(axes)
        deviation = x.std(axes, keepdims=True)
        return ((x - x.mean(axes, keepdims=True)) / (deviation + 1e-9),)


def log_softmax(x: Any, axes: int | tuple[int, ...]) -> Any:
    """The logarithms of a softmax, finite where the softmax itself is too small for the type."""
    x = x - x.max(axes, keepdims=True)
    return x - np.log(np.exp(x).sum(axes, keepdims=True))

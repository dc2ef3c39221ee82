"""Losses, and what only they need."""

from __future__ import annotations

from typing import Any

from onnxscript import opset18 as op

from modelexport.capture.repairs.constants import INT64, ints


def cross_entropy(
    self: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Torchlib ignores ``label_smoothing``, and treats class probabilities as labels.

    Upstream: onnxscript ``aten_cross_entropy_loss`` ("this was ignored due to ONNX not support").
    """
    names = ("none", "mean", "sum")
    probabilities = target.dtype is not None and target.dtype.is_floating_point()
    if not label_smoothing and not probabilities:
        loss, _ = op.SoftmaxCrossEntropyLoss(
            self, target, weight, reduction=names[reduction], ignore_index=ignore_index
        )
        return loss
    axis = 1 if len(self.shape) > 1 else 0
    logs = op.LogSoftmax(self, axis=axis)
    classes = op.CastLike(op.Gather(op.Shape(self), ints(axis)), self)
    keep = op.CastLike(op.Constant(value_float=1.0 - label_smoothing), self)
    spread = op.Div(op.CastLike(op.Constant(value_float=label_smoothing), self), classes)
    rank = len(self.shape)
    by_class = op.Reshape(weight, ints(*(-1 if i == axis else 1 for i in range(rank)))) if weight is not None else None
    weighted = logs if by_class is None else op.Mul(logs, by_class)
    if probabilities:
        smoothed = op.Add(op.Mul(target, keep), spread)
        losses = op.Neg(op.ReduceSum(op.Mul(smoothed, weighted), ints(axis), keepdims=0))
        total = op.Size(losses)
        return _reduced(losses, op.CastLike(total, self), reduction)
    used = op.Not(op.Equal(target, op.CastLike(op.Constant(value_int=ignore_index), target)))
    index = op.Unsqueeze(op.Where(used, target, op.CastLike(op.Constant(value_int=0), target)), ints(axis))
    mask = op.CastLike(used, self)
    chosen = op.Squeeze(op.GatherElements(weighted, index, axis=axis), ints(axis))
    everything = op.ReduceSum(weighted, ints(axis), keepdims=0)
    losses = op.Mul(op.Neg(op.Add(op.Mul(chosen, keep), op.Mul(everything, spread))), mask)
    if by_class is None:
        total = op.ReduceSum(mask, keepdims=0)
    else:
        total = op.ReduceSum(op.Mul(op.Gather(weight, op.Squeeze(index, ints(axis))), mask), keepdims=0)
    return _reduced(losses, total, reduction)


def _reduced(losses: Any, total: Any, reduction: int) -> Any:
    if reduction == 0:
        return losses
    added = op.ReduceSum(losses, keepdims=0)
    return added if reduction == 2 else op.Div(added, total)


def multilabel_margin_loss(self: Any, target: Any, reduction: int = 1) -> Any:
    """The exporter's decomposition computes another value.

    The labels of a row end at the first -1. For each label and each class that is not a label, ``max(0, 1 - (x[label]
    - x[class]))`` is added; the sum is divided by the number of classes.
    """
    last = len(self.shape) - 1
    target = op.Cast(target, to=INT64)
    ended = op.Cast(op.Less(target, op.Constant(value_int=0)), to=INT64)
    valid = op.Equal(op.CumSum(ended, op.Constant(value_int=last)), op.Constant(value_int=0))
    index = op.Where(valid, target, op.Constant(value_int=0))
    valid_number = op.CastLike(valid, self)
    label = op.Unsqueeze(op.GatherElements(self, index, axis=last), ints(last + 1))
    classes = op.Range(
        op.Constant(value_int=0), op.Squeeze(op.Gather(op.Shape(self), ints(last)), ints(0)), op.Constant(value_int=1)
    )
    same = op.And(op.Equal(op.Unsqueeze(index, ints(last + 1)), classes), op.Unsqueeze(valid, ints(last + 1)))
    none = op.Sub(
        op.CastLike(op.Constant(value_float=1.0), self), op.ReduceMax(op.CastLike(same, self), ints(last), keepdims=1)
    )
    one = op.CastLike(op.Constant(value_float=1.0), self)
    margin = op.Relu(op.Add(op.Sub(one, label), op.Unsqueeze(self, ints(last))))
    counted = op.Mul(op.Mul(margin, none), op.Unsqueeze(valid_number, ints(last + 1)))
    added = op.ReduceSum(counted, ints(last, last + 1), keepdims=0)
    losses = op.Div(added, op.CastLike(op.Squeeze(op.Gather(op.Shape(self), ints(last)), ints(0)), self))
    return _reduced(losses, op.CastLike(op.Size(losses), self), reduction)


def rrelu(self: Any, lower: float = 0.125, upper: float = 1 / 3, training: bool = False, generator: Any = None) -> Any:
    """In evaluation mode the slope is the mean of the bounds; the exporter looks for a translation with noise."""
    if training:
        raise ValueError("RReLU in training mode draws random slopes: put the model into evaluation mode")
    return op.LeakyRelu(self, alpha=(lower + upper) / 2)

"""Loss functions, and the operators that only these use."""

from __future__ import annotations

from typing import Any

import torch


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
    if not label_smoothing and not target.is_floating_point():
        return NotImplemented
    axis = 1 if self.dim() > 1 else 0
    logs = torch.log_softmax(self, axis)
    if weight is not None:
        logs = logs * weight.reshape([-1 if i == axis else 1 for i in range(self.dim())])
    keep, spread = 1 - label_smoothing, label_smoothing / self.shape[axis]
    if target.is_floating_point():
        losses = -(logs * (target * keep + spread)).sum(axis)
        return _reduced(losses, losses.numel(), reduction)
    used = target != ignore_index
    index = torch.where(used, target, 0)
    chosen = logs.gather(axis, index.unsqueeze(axis)).squeeze(axis)
    losses = -(chosen * keep + logs.sum(axis) * spread) * used
    counted = used.to(self.dtype) if weight is None else weight[index] * used
    return _reduced(losses, counted.sum(), reduction)


def _reduced(losses: Any, total: Any, reduction: int) -> Any:
    if reduction == 0:
        return losses
    return losses.sum() if reduction == 2 else losses.sum() / total


def multilabel_margin_loss(self: Any, target: Any, reduction: int = 1) -> Any:
    """The exporter's decomposition computes another value.

    The labels of a row end at the first -1. For each label and each class that is not a label, ``max(0, 1 - (x[label]
    - x[class]))`` is added; the sum is divided by the number of classes.
    """
    valid = (target < 0).long().cumsum(-1) == 0
    index = torch.where(valid, target, 0)
    label = self.gather(-1, index).unsqueeze(-1)
    is_label = (index.unsqueeze(-1) == torch.arange(self.shape[-1])) & valid.unsqueeze(-1)
    counted = valid.unsqueeze(-1) & ~is_label.any(-2, keepdim=True)
    losses = (torch.relu(1 - label + self.unsqueeze(-2)) * counted).sum((-2, -1)) / self.shape[-1]
    return _reduced(losses, losses.numel(), reduction)


def rrelu(self: Any, lower: float = 0.125, upper: float = 1 / 3, training: bool = False, generator: Any = None) -> Any:
    """``RReLU`` in evaluation mode: its slope is the mean of the bounds. torch.onnx translates only noisy slopes."""
    if training:
        raise ValueError("RReLU in training mode draws random slopes: put the model into evaluation mode")
    return torch.nn.functional.leaky_relu(self, (lower + upper) / 2)

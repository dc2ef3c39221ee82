"""The model of the goldens. They contain the lines of its classes: a line more above them changes the goldens."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Golden(nn.Module):
    """A block called twice, one with two names, one in a branch, two calls that share a node, and a module left out."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Block()
        self.stem = Block()
        self.entry = self.stem
        self.inner = Block()
        self.left = nn.Tanh()
        self.right = nn.Tanh()
        self.dropout = nn.Dropout()
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(self.dropout(self.entry(x)))
        x = self.shared(self.left(x) + self.right(x))
        return torch.cond(x.sum() > 0, lambda y: self.inner(y) + x, lambda y: y - 1.0, (x,))


def golden_model() -> nn.Module:
    """Its weights are small numbers that have an exact text form."""
    model = Golden().eval()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_((torch.arange(parameter.numel()).reshape(parameter.shape) + index) / 8)
    return model

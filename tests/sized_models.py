"""Small models that decide, loop or compute by sizes: the kinds of the study of ``size_decisions.py``.

Each kind is a function of an axis and a number, which give its variants. ``x`` has two axes of any size, and a last
one of four.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional

Tensor = torch.Tensor
Forward = Callable[..., Tensor]


class Sized(nn.Module):
    """A function of sizes, with parameters that some kinds use."""

    def __init__(self, function: Callable[..., Tensor], inputs: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.table = nn.Parameter(torch.randn(64, 4))
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.recurrent = nn.GRU(4, 4, batch_first=True)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        if inputs == 1:
            self.forward = self._of_one  # type: ignore[method-assign]

    def _of_one(self, x: Tensor) -> Tensor:
        return self.function(self, x)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(self, x, y)


def _pad_to(x: Tensor, axis: int, multiple: int) -> Tensor:
    after = -x.shape[axis] % multiple
    return functional.pad(x, (0, 0, *((0, after) if axis == 1 else (0, 0, 0, after))))


def _loop(x: Tensor, axis: int) -> Tensor:
    return torch.stack([row * (index + 1) for index, row in enumerate(x.unbind(axis))], axis)


def _neighbors(x: Tensor, axis: int) -> Tensor:
    total = x.sum(axis)
    for index in range(x.shape[axis] - 1):
        total = total + x.select(axis, index) * x.select(axis, index + 1)
    return total


def _causal(x: Tensor, axis: int) -> Tensor:
    x = x if axis == 1 else x.transpose(0, 1)
    mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
    return (x @ x.transpose(1, 2) + mask).softmax(-1) @ x


def _class_token(m: Sized, x: Tensor, axis: int) -> Tensor:
    return torch.cat([m.token.expand(*((-1, x.shape[1]) if axis == 0 else (x.shape[0], -1)), -1), x], axis)


ONE_AXIS: dict[str, Callable[[int, int], Forward]] = {
    "branch above": lambda a, k: lambda m, x: x * (2.0 if x.shape[a] > k else 1.0),
    "branch equal": lambda a, k: lambda m, x: x - x.mean(a, keepdim=True) if x.shape[a] == k else x + 1,
    "parity": lambda a, k: lambda m, x: x * 3 if x.shape[a] % (k + 1) else x,
    "loop over rows": lambda a, k: lambda m, x: _loop(x, a),
    "loop over neighbors": lambda a, k: lambda m, x: _neighbors(x, a),
    "number": lambda a, k: lambda m, x: x * int(x.shape[a]),
    "quotient": lambda a, k: lambda m, x: x / (x.shape[a] // k + 1),
    "root": lambda a, k: lambda m, x: x * math.sqrt(x.shape[a] + k),
    "squeeze": lambda a, k: lambda m, x: x.squeeze(a).sum(0) * k,
    "squeeze all": lambda a, k: lambda m, x: x.squeeze() * k,
    "class token": lambda a, k: lambda m, x: _class_token(m, x, a),
    "state": lambda a, k: lambda m, x: m.recurrent(x, x.new_zeros(1, len(x), 4))[0].narrow(a, 0, 1) * k,
    "recurrent": lambda a, k: lambda m, x: m.recurrent(x if a else x.transpose(0, 1))[k % 2],
    "causal mask": lambda a, k: lambda m, x: _causal(x, a) * k,
    "einsum": lambda a, k: lambda m, x: torch.einsum("abc,dbc->ad" if a else "abc,adc->bd", x, x * k),
    "flatten": lambda a, k: lambda m, x: x.flatten(a) * k,
    "reshape": lambda a, k: lambda m, x: x.reshape(x.shape[0], -1, 2).sum(a) * k,
    "reshape by sizes": lambda a, k: lambda m, x: x.reshape(x.shape[0] * x.shape[1], 2, 2).sum(k % 2),
    "table": lambda a, k: lambda m, x: x.transpose(1, a) + m.table[k : x.shape[a] + k],
    "positions": lambda a, k: lambda m, x: x.transpose(1, a) + m.table[torch.arange(x.shape[a]) % (k + 2)],
    "spread": lambda a, k: lambda m, x: x.std(a, correction=0) * k + x.amax(a),
    "running sum": lambda a, k: lambda m, x: x.cumsum(a).roll(k, a),
    "shift": lambda a, k: lambda m, x: x - x.roll(x.shape[a] // 2, a) * k,
    "interpolated": lambda a, k: lambda m, x: x.transpose(1, a) + functional.interpolate(
        m.table[None, : 2 + k].transpose(1, 2), size=x.shape[a], mode="linear").transpose(1, 2),
    "padded": lambda a, k: lambda m, x: _pad_to(x, a, k + 1).cumsum(a),
    "truncated": lambda a, k: lambda m, x: x.narrow(a, 0, min(k, x.shape[a])).sum(a),
    "chunks": lambda a, k: lambda m, x: torch.cat([part.cumsum(a) for part in x.chunk(k + 1, a)], a),
    "split": lambda a, k: lambda m, x: torch.cat([part.flip(a) for part in x.split(k + 1, a)], a),
    "tensor_split": lambda a, k: lambda m, x: sum(part.sum(a) * i for i, part in enumerate(x.tensor_split(k + 1, a))),
    "repeated": lambda a, k: lambda m, x: x.sum(a, keepdim=True).expand_as(x) * x.repeat_interleave(k, a).mean(),
    "identity": lambda a, k: lambda m, x: (torch.eye(x.shape[a]) * k) @ x.transpose(1, a),
    "outer": lambda a, k: lambda m, x: x.select(a, 0)[:, None] * x.select(a, 0)[None] * k,
    "top": lambda a, k: lambda m, x: x.topk(min(k, x.shape[a]), a).values,
    "ramp": lambda a, k: lambda m, x: x.transpose(1, a) * torch.linspace(0, k, x.shape[a])[:, None],
    "last": lambda a, k: lambda m, x: x.select(a, x.shape[a] - 1) * k,
    "middle": lambda a, k: lambda m, x: x.select(a, x.shape[a] // 2) * k,
    "attention": lambda a, k: lambda m, x: functional.scaled_dot_product_attention(
        *[m.linear(x.transpose(1, a))] * 3, is_causal=k == 1),
    "convolution": lambda a, k: lambda m, x: m.conv(x.transpose(1, a).transpose(1, 2)) * k,
    "norm": lambda a, k: lambda m, x: m.norm(x.flatten(0, 1)).reshape(x.shape) * x.shape[a] + k,
    "windows": lambda a, k: lambda m, x: functional.avg_pool1d(x.transpose(1, a).transpose(1, 2), k, ceil_mode=True),
    "broadcast": lambda a, k: lambda m, x: x + x.narrow(a, 0, 1) * k,
    "stacked": lambda a, k: lambda m, x: torch.stack([x] * k, a).sum(1 - a),
    "filled": lambda a, k: lambda m, x: x + torch.full((x.shape[0], 1, 1), float(x.shape[a] > k)),
    "ternary": lambda a, k: lambda m, x: x.mean(a) if x.shape[a] > k else x.select(a, 0),
    "assigned": lambda a, k: lambda m, x: x.index_fill(a, torch.tensor([x.shape[a] - 1]), float(k)),
    "length of a list": lambda a, k: lambda m, x: x * len(list(x.unbind(a))) + k,
    "numel": lambda a, k: lambda m, x: x * (2.0 if x.numel() > 8 * k else 1.0),
    "product of sizes": lambda a, k: lambda m, x: x * (2.0 if x.shape[0] * x.shape[1] > 4 * k else 1.0),
    "both": lambda a, k: lambda m, x: x * (2.0 if x.shape[0] > k and x.shape[1] > k else 1.0),
    "lookup": lambda a, k: lambda m, x: x * {1: 2.0, 2: 3.0, 5: 4.0}.get(x.shape[a], float(k)),
}  # fmt: skip
"""Kind to what makes the forward of an axis and a number."""


def models_of_one_axis() -> Iterator[tuple[str, Sized]]:
    """150 models, each with a name: every kind of the first axis, of the second, and with another number."""
    for (axis, number), (kind, make) in itertools.product(((0, 1), (1, 2), (1, 1)), ONE_AXIS.items()):
        yield f"{kind}, axis {axis}, {number}", Sized(make(axis, number))


_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "n > m": lambda n, m: n > m, "n >= m": lambda n, m: n >= m, "n == m": lambda n, m: n == m,
    "n != m": lambda n, m: n != m, "n < 2 m": lambda n, m: n < 2 * m, "n + m > 6": lambda n, m: n + m > 6,
    "n m > 12": lambda n, m: n * m > 12, "n % m": lambda n, m: n % m == 0,
    "n // 2 == m // 2": lambda n, m: n // 2 == m // 2,
    "n / m > 0.7": lambda n, m: n / m > 0.7,
}  # fmt: skip


def _padded(x: Tensor, length: int) -> Tensor:
    return functional.pad(x, (0, 0, 0, max(length - x.shape[0], 0)))


_BODIES: dict[str, Callable[[Callable[[int, int], bool]], Forward]] = {
    "scaled": lambda holds: lambda m, x, y: x.sum(0) + y.sum(0) * (2 if holds(len(x), y.shape[0]) else 1),
    "padded or cut": lambda holds: lambda m, x, y: (
        x + _padded(y, x.shape[0])[: x.shape[0]]
        if holds(x.shape[0], y.shape[0]) else _padded(x, y.shape[0])[: y.shape[0]] + y),
    "one line": lambda holds: lambda m, x, y: torch.cat([x, y] if holds(x.shape[0], y.shape[0]) else [y, x]),
    "a loop": lambda holds: lambda m, x, y: sum(
        (row for index, row in enumerate(x) if holds(index + 1, y.shape[0])), y.sum(0)),
    "both inner axes": lambda holds: lambda m, x, y: x.sum() + torch.ones(
        y.shape[0] if holds(x.shape[0], x.shape[1]) else x.shape[1]) + y.sum(),
    "a minimum": lambda holds: lambda m, x, y: (
        x[: min(x.shape[0], y.shape[0])] * (y[: min(x.shape[0], y.shape[0])] if holds(x.shape[0], y.shape[0]) else 2)),
}  # fmt: skip


def models_of_two_sizes() -> Iterator[tuple[str, Sized]]:
    """60 models that compare two sizes, each with a name."""
    for (body, make), (what, holds) in itertools.product(_BODIES.items(), _COMPARISONS.items()):
        yield f"{body}, {what}", Sized(make(holds), inputs=2)

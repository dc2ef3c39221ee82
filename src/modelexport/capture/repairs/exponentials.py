"""Exponentials and logarithms that torch.onnx writes out, so that they overflow, or lose small numbers beside one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def log_plus_one(self: Any) -> Any:
    """``log1p`` by Kahan: the logarithm of the rounded sum, times the share of the number that rounding left."""
    total = self + 1
    left = total - 1
    share = torch.where(left == self, 1, self / left)  # also of infinity
    return torch.where(left == 0, self, torch.log(total) * share)


def exponential_minus_one(self: Any) -> Any:
    """``expm1`` by Kahan, for small numbers."""
    power = torch.exp(self)
    small = torch.where(power == 1, self, (power - 1) * (self / torch.log(power)))
    return torch.where(torch.abs(self) < 1, small, power - 1)


def log_of_sum(base: float, power: Callable[[Any], Any]) -> Callable[..., Any]:
    """``logaddexp`` and ``logaddexp2``: no power is above one."""

    def added(self: Any, other: Any) -> Any:
        apart, larger = torch.abs(self - other), torch.maximum(self, other)
        more = torch.log1p(power(-apart)) / math.log(base)
        return larger + torch.where(self == other, math.log(2) / math.log(base), more)

    return added


def running_log_of_sum(self: Any, dim: int) -> Any:
    """``logcumsumexp``: a square table of which elements lie before which, as for ``cummax``."""
    if not self.dim():
        return self.clone()
    elements = self.movedim(dim, -1)
    places = torch.arange(elements.shape[-1])
    before = torch.where(places <= places.unsqueeze(1), elements.unsqueeze(-2), float("-inf"))
    return before.logsumexp(-1).movedim(-1, dim)


def scaled_error_complement(self: Any) -> Any:
    """``erfcx``, the product of ``exp(x ** 2)`` and ``erfc(x)``, which is finite where the two are not."""
    x = self.double()
    scaled = _scaled_complement(torch.abs(x))
    return torch.where(x < 0, 2 * torch.exp(x * x) - scaled, scaled).to(self.dtype)


def error_complement(self: Any) -> Any:
    """``erfc``, of which one minus ``erf`` leaves nothing for large numbers."""
    x = self.double()
    tail = torch.exp(-x * x) * _scaled_complement(torch.abs(x))
    return torch.where(x < 0, 2 - tail, tail).to(self.dtype)


def _scaled_complement(x: Any) -> Any:
    """``erfcx`` of numbers that are not negative, in double precision: a polynomial in ``2 / (2 + x)``."""
    place = 2 / (2 + x)
    argument, total = 2 * place - 1, torch.zeros_like(x)
    for coefficient in _COEFFICIENTS:
        total = total * argument + coefficient
    return total * place


def _interpolated() -> list[float]:
    """Its coefficients, the highest power first, from PyTorch's ``erfcx``; before a capture, which would record it."""

    def share(argument: Any) -> Any:
        place = torch.from_numpy((argument + 1) / 2)
        return (torch.special.erfcx(2 / place - 2) / place).numpy()

    series = np.polynomial.chebyshev.chebinterpolate(share, 27)
    powers: list[float] = np.polynomial.chebyshev.cheb2poly(series)[::-1].tolist()
    return powers


_COEFFICIENTS = _interpolated()

"""Functions of numbers, one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

_LANCZOS = (
    0.99999999999980993, 676.5203681218851, -1259.1392167224028, 771.32342877765313, -176.61502916214059,
    12.507343278686905, -0.13857109526572012, 9.9843695780195716e-6, 1.5056327351493116e-7,
)  # fmt: skip
"""Coefficients of the Lanczos approximation with g = 7 (Godfrey), good to 15 digits."""


def product(self: Any, *, dtype: Any = None) -> Any:
    """``prod`` of all elements is decomposed into an operator that nothing translates."""
    return torch.prod(self.reshape(-1), 0, dtype=dtype)


def is_negative(x: Any) -> Any:
    """``signbit``, into which ``copysign`` is decomposed. Zero has a sign as well."""
    return (x < 0) | ((x == 0) & (1 / x < 0)) if x.is_floating_point() else x < 0


def log_sigmoid(self: Any) -> Any:
    """It is translated to the logarithm of ``Sigmoid``, of which nothing is left for numbers far below zero."""
    return self.clamp(max=0) - torch.nn.functional.softplus(torch.minimum(self, -self))


def log_gamma(self: Any) -> Any:
    """In double precision, since the sum alternates; reflected below a half."""
    x = self.double()
    low = x < 0.5
    z = torch.where(low, 1 - x, x) - 1
    total = sum((one / (z + i) for i, one in enumerate(_LANCZOS[1:], 1)), torch.full_like(z, _LANCZOS[0]))
    t = z + 7.5
    value = (z + 0.5) * torch.log(t) - t + torch.log(total) + 0.5 * math.log(2 * math.pi)
    sine = torch.abs(torch.sin(math.pi * (x - torch.floor(x))))
    return torch.where(low, math.log(math.pi) - torch.log(sine) - value, value).to(self.dtype)


def error_inverse(self: Any) -> Any:
    """``erfinv``: Giles' polynomials for single precision, in the middle and towards the ends."""
    x = self.double()
    w = -torch.log((1 - x) * (1 + x))
    middle, ends = _polynomial(_MIDDLE, w - 2.5), _polynomial(_ENDS, torch.sqrt(w) - 3)
    return (torch.where(w < 5, middle, ends) * x).to(self.dtype)


_MIDDLE = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip
_ENDS = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
    1.00167406, 2.83297682,
)  # fmt: skip


def _polynomial(coefficients: Sequence[float], x: Any) -> Any:
    total = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


def hypotenuse(self: Any, other: Any) -> Any:
    """Without squares of large numbers."""
    self, other = torch.abs(self), torch.abs(other)
    longer = torch.maximum(self, other)
    share = torch.minimum(self, other) / torch.where(longer == 0, 1, longer)
    return longer * torch.sqrt(1 + share * share)


def digamma(self: Any) -> Any:
    """Its asymptotic series beyond 6; recurrence below; reflection for negative numbers."""
    x = self.to(torch.float64)
    negative = x < 0.5
    z = torch.where(negative, 1 - x, x)
    below = torch.zeros_like(z)
    for _ in range(6):
        below = below + 1 / z
        z = z + 1
    inverse = 1 / (z * z)
    series = torch.zeros_like(z)
    for coefficient in (1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12):
        series = (series + coefficient) * inverse
    value = torch.log(z) - 0.5 / z - series - below
    angle = torch.pi * x  # ONNX Runtime has no tangent in double precision
    return torch.where(negative, value - torch.pi * torch.cos(angle) / torch.sin(angle), value).to(self.dtype)


def histogram(input: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """``histc``: elements out of bounds are not counted; the last bin has its upper bound."""
    x = input.reshape(-1)
    low, high = (torch.full((), float(one), dtype=x.dtype) for one in (min, max))
    if min == max:
        low, high = x.min(), x.max()
        alike = low == high
        low, high = torch.where(alike, low - 1, low), torch.where(alike, high + 1, high)
    place = ((x - low) * bins / (high - low)).floor().clamp(max=bins - 1)
    place = torch.where((x < low) | (x > high), -1, place)
    return (place == torch.arange(bins, dtype=place.dtype).unsqueeze(-1)).to(x.dtype).sum(-1)

"""Functions of numbers, one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from modelexport.capture.patches import private

_LANCZOS = (
    0.99999999999980993, 676.5203681218851, -1259.1392167224028, 771.32342877765313, -176.61502916214059,
    12.507343278686905, -0.13857109526572012, 9.9843695780195716e-6, 1.5056327351493116e-7,
)  # fmt: skip
"""Coefficients of the Lanczos approximation with g = 7 (Godfrey), good to 15 digits."""


def product_along(self: Any, dims: Sequence[int] | None, *, output_dtype: Any = None) -> Any:
    """``prims.prod``, into which ``cumprod`` and the product of all elements are decomposed."""
    for dim in sorted(range(self.dim()) if dims is None else dims, reverse=True):
        self = torch.prod(self, dim, dtype=output_dtype)
    return self


def weight_normalized(v: Any, g: Any, dim: int = 0) -> Any:
    """Weight normalization of a vector by the norm of each element: PyTorch's definition takes that of all of them."""
    if v.dim() == 1 and dim == 0:
        return v * (g / v.abs()), v.abs()
    return private("definitions")[torch.ops.aten._weight_norm_interface.default](v, g, dim)


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
    total = sum(
        (coefficient / (z + i) for i, coefficient in enumerate(_LANCZOS[1:], 1)), torch.full_like(z, _LANCZOS[0])
    )
    t = z + 7.5
    value = (z + 0.5) * torch.log(t) - t + torch.log(total) + 0.5 * math.log(2 * math.pi)
    sine = torch.abs(torch.sin(math.pi * (x - torch.floor(x))))
    return torch.where(low, math.log(math.pi) - torch.log(sine) - value, value).to(self.dtype)


def error_inverse(self: Any) -> Any:
    """``erfinv``: Giles' polynomials for double precision, in the middle and towards the ends."""
    x = self.double()
    w = -torch.log((1 - x) * (1 + x))
    middle, ends = _polynomial(_MIDDLE, w - 3.125), _polynomial(_ENDS, torch.sqrt(w) - 3.25)
    return (torch.where(w < 6.25, middle, ends) * x).to(self.dtype)


_MIDDLE = (
    -3.6444120640178196996e-21, -1.685059138182016589e-19, 1.2858480715256400167e-18, 1.115787767802518096e-17,
    -1.333171662854620906e-16, 2.0972767875968561637e-17, 6.6376381343583238325e-15, -4.0545662729752068639e-14,
    -8.1519341976054721522e-14, 2.6335093153082322977e-12, -1.2975133253453532498e-11, -5.4154120542946279317e-11,
    1.051212273321532285e-09, -4.1126339803469836976e-09, -2.9070369957882005086e-08, 4.2347877827932403518e-07,
    -1.3654692000834678645e-06, -1.3882523362786468719e-05, 0.0001867342080340571352, -0.00074070253416626697512,
    -0.0060336708714301490533, 0.24015818242558961693, 1.6536545626831027356,
)  # fmt: skip
_ENDS = (
    2.2137376921775787049e-09, 9.0756561938885390979e-08, -2.7517406297064545428e-07, 1.8239629214389227755e-08,
    1.5027403968909827627e-06, -4.013867526981545969e-06, 2.9234449089955446044e-06, 1.2475304481671778723e-05,
    -4.7318229009055733981e-05, 6.8284851459573175448e-05, 2.4031110387097893999e-05, -0.0003550375203628474796,
    0.00095328937973738049703, -0.0016882755560235047313, 0.0024914420961078508066, -0.0037512085075692412107,
    0.005370914553590063617, 1.0052589676941592334, 3.0838856104922207635,
)  # fmt: skip
"""Good for all numbers of float32 between -1 and 1."""


def _polynomial(coefficients: Sequence[float], x: Any) -> Any:
    total = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


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
    low, high = (torch.full((), float(bound), dtype=x.dtype) for bound in (min, max))
    if min == max:
        low, high = x.min(), x.max()
        alike = low == high
        low, high = torch.where(alike, low - 1, low), torch.where(alike, high + 1, high)
    place = ((x - low) * bins / (high - low)).floor().clamp(max=bins - 1)
    place = torch.where((x < low) | (x > high), -1, place)
    return (place == torch.arange(bins, dtype=place.dtype).unsqueeze(-1)).to(x.dtype).sum(-1)

"""Special functions, computed element by element.

torch.onnx lacks some. Others it writes out so that they overflow or lose small numbers beside one, or computes from
rounded quotients or without the sign of zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from modelexport.capture.patches import private
from modelexport.capture.repairs import integers

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


def rounded_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of which PyTorch's kernel rounds once: it computes half precision in float32."""

    def computed(self: Any, *others: Any, **how: Any) -> Any:
        if getattr(self, "dtype", None) not in (torch.float16, torch.bfloat16):
            return function(self, *others, **how)
        wide = (
            each.float() if isinstance(each, torch.Tensor) and each.dtype is self.dtype else each for each in others
        )
        result = function(self.float(), *wide, **how)
        return result if result is NotImplemented else result.to(self.dtype)

    return computed


def rounded_with_its_number(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a tensor and a number of which PyTorch's kernel rounds both to half precision, and then its
    result.
    """

    def computed(input: Any, other: Any, **options: Any) -> Any:
        is_half = getattr(input, "dtype", None) in (torch.float16, torch.bfloat16)
        if is_half and type(other) is float:
            other = torch.full((), other, dtype=input.dtype)
        return rounded_once(function)(input, other) if not options else function(input, other, **options)

    return computed


def weight_normalized(v: Any, g: Any, dim: int = 0) -> Any:
    """Weight normalization of a vector by the norm of each element: PyTorch's definition takes that of all of them."""
    if v.dim() == 1 and dim == 0:
        return v * (g / v.abs()), v.abs()
    return private("definitions")[torch.ops.aten._weight_norm_interface.default](v, g, dim)


def is_negative(x: Any) -> Any:
    """``signbit``, into which ``copysign`` is decomposed. Zero has a sign as well."""
    return (x < 0) | ((x == 0) & (1 / x < 0)) if x.is_floating_point() else x < 0


def log_sigmoid(self: Any) -> Any:
    """``logsigmoid`` by ``softplus``; torch.onnx writes ``Log(Sigmoid(x))``, which is -inf far below zero."""
    return self.clamp(max=0) - torch.nn.functional.softplus(torch.minimum(self, -self))


def log_gamma(self: Any) -> Any:
    """``lgamma`` by Lanczos' sum, in double precision because its terms alternate; reflected below 0.5."""
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
    """``erfinv``: Giles' polynomials for double precision, in the middle, towards the ends, and near them."""
    x = self.double()
    w = -torch.log((1 - x) * (1 + x))
    root = torch.sqrt(w)
    is_near = (w >= 16) & (w < math.inf)  # at the ends themselves, the polynomial of ``_ENDS`` has the right sign
    ends = torch.where(is_near, _polynomial(_NEAR_ENDS, root - 5), _polynomial(_ENDS, root - 3.25))
    return (torch.where(w < 6.25, _polynomial(_MIDDLE, w - 3.125), ends) * x).to(self.dtype)


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
_NEAR_ENDS = (
    -2.7109920616438573243e-11, -2.5556418169965252055e-10, 1.5076572693500548083e-09, -3.7894654401267369937e-09,
    7.6157012080783393804e-09, -1.4960026627149240478e-08, 2.9147953450901080826e-08, -6.7711997758452339498e-08,
    2.2900482228026654717e-07, -9.9298272942317002539e-07, 4.5260625972231537039e-06, -1.9681778105531670567e-05,
    7.5995277030017761139e-05, -0.00021503011930044477347, -0.00013871931833623122026, 1.0103004648645343977,
    4.8499064014085844221,
)  # fmt: skip


def _polynomial(coefficients: Sequence[float], x: Any) -> Any:
    total = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


def digamma(self: Any) -> Any:
    """``digamma``: the asymptotic series above 6, the recurrence below it, reflection for negative numbers."""
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
    return _polynomial(_COEFFICIENTS, 2 * place - 1) * place


def _interpolated() -> list[float]:
    """Its coefficients, the highest power first, from PyTorch's ``erfcx``; before a capture, which would record it."""

    def share(argument: Any) -> Any:
        place = torch.from_numpy((argument + 1) / 2)
        return (torch.special.erfcx(2 / place - 2) / place).numpy()

    series = np.polynomial.chebyshev.chebinterpolate(share, 27)
    return np.polynomial.chebyshev.cheb2poly(series)[::-1].tolist()


_COEFFICIENTS = _interpolated()


def remainder(self: Any, other: Any) -> Any:
    """``remainder`` of numbers with fractions, from the exact ``fmod``: 1 - floor(1 / 0.1) * 0.1 is 0, and not 0.1."""
    if not _has_fractions(self, other):
        return integers.with_sizes_as_tensors(torch.remainder)(self, other)
    rest = torch.fmod(self, other)
    return torch.where(_has_other_sign(rest, other), rest + other, rest)


def but_nan(is_beyond: Callable[..., Any]) -> Callable[..., Any]:
    """``fmax`` and ``fmin``, which give the other number for NaN."""

    def extreme(self: Any, other: Any) -> Any:
        missing = torch.isnan(self) if self.is_floating_point() else torch.full((), False)
        return torch.where(missing | is_beyond(other, self), other, self)

    return extreme


def quotient(self: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    """``div``, if it is rounded: translations divide before the remainder is known, and integers in float32."""
    if rounding_mode is None:
        return NotImplemented
    if _has_fractions(self, other):
        return floored_quotient(self, other) if rounding_mode == "floor" else truncated(self / other)
    return torch.floor_divide(self if rounding_mode == "floor" else self - torch.fmod(self, other), other)


def truncated(input: Any, **options: Any) -> Any:
    """``trunc``, also of infinities and of what no integer holds, through which the TorchScript exporter goes."""
    if options or not input.is_floating_point():
        return torch.trunc(input, **options)
    return torch.where(input < 0, input.ceil(), input.floor())


def fraction(input: Any, **options: Any) -> Any:
    """``frac``, which the TorchScript exporter does not translate."""
    return torch.frac(input, **options) if options else input - truncated(input)


def floored_quotient(self: Any, other: Any) -> Any:
    """``floor_divide`` of numbers with fractions, from the same remainder; also of a number of Python by a tensor."""
    if not isinstance(self, torch.Tensor):
        return torch.floor_divide(torch.full((), self, dtype=torch.result_type(self, other)), other)
    if not _has_fractions(self, other):
        return NotImplemented
    rest = torch.fmod(self, other)
    whole = (self - rest) / other
    whole = torch.where(_has_other_sign(rest, other), whole - 1, whole)
    whole = torch.round(whole)
    if not isinstance(other, torch.Tensor):
        return whole if other else self / other
    return torch.where(other == 0, self / other, whole)


def _has_other_sign(rest: Any, other: Any) -> Any:
    if isinstance(other, torch.Tensor):
        return (rest != 0) & ((rest < 0) != (other < 0))
    return rest > 0 if other < 0 else rest < 0


def _has_fractions(self: Any, other: Any) -> bool:
    return bool(torch.result_type(self, other).is_floating_point)


def angle(self: Any, other: Any) -> Any:
    """``atan2``, which is pi, not -pi, for zero and a negative number."""
    slope = torch.where(self == other, 1.0, torch.where(self == -other, -1.0, self / other))  # also of infinities
    within = torch.atan(torch.where((self == 0) & (other == 0), self, slope))
    half_turn = torch.where(is_negative(self), -math.pi, math.pi).to(within.dtype)
    return torch.where(is_negative(other), within + half_turn, within)


def hypotenuse(self: Any, other: Any) -> Any:
    """``hypot`` without squares of large numbers."""
    self, other = torch.abs(self), torch.abs(other)
    longer = torch.maximum(self, other)
    share = torch.minimum(self, other) / torch.where(longer == 0, 1, longer)
    length = longer * torch.sqrt(1 + share * share)
    return torch.where((self == float("inf")) | (other == float("inf")), float("inf"), length)

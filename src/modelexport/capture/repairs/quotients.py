"""Quotients, remainders and angles, which torch.onnx computes from rounded quotients or without the sign of zero."""

from __future__ import annotations

import math
from typing import Any

import torch

from modelexport.capture.repairs.special_functions import is_negative


def remainder(self: Any, other: Any) -> Any:
    """``remainder`` of numbers with fractions, from the exact ``fmod``: 1 - floor(1 / 0.1) * 0.1 is 0, and not 0.1."""
    if not _has_fractions(self, other):
        return NotImplemented
    rest = torch.fmod(self, other)
    return torch.where(_has_other_sign(rest, other), rest + other, rest)


def quotient(self: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    """``div``, if it is rounded: translations divide integers in float32, and others before the remainder is known."""
    if not _has_fractions(self, other) and rounding_mode is not None:
        whole = torch.floor_divide(self, other)
        is_below = (whole < 0) & (whole * other != self)
        return torch.where(is_below, whole + 1, whole) if rounding_mode == "trunc" else whole
    return floored_quotient(self, other) if rounding_mode == "floor" else NotImplemented


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
    return torch.where(other == 0, self / other, whole) if isinstance(other, torch.Tensor) else whole


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

"""Numbers of a run in float64: what is widened, what bfloat16 rounds, and the limits that a model asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from modelexport.core.replaced_attributes import attribute_set


def as_float(value: Any) -> Any:
    """A tensor in float64; anything else as it is."""
    return value.double() if isinstance(value, torch.Tensor) else value


def exact(value: Any) -> Any:
    """A tensor of bfloat16 in float64; anything else as it is."""
    return value.double() if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16 else value


def by_element(value: Any) -> Any:
    """As an operation by elements takes a tensor beside one of bfloat16: integers are converted to that type."""
    integers = isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dtype is not torch.bool
    return exact(value.bfloat16() if integers else value)


def as_narrow(value: Any, like: Any) -> Any:
    """A result in float64, rounded if PyTorch rounds it to bfloat16."""
    return value.bfloat16() if isinstance(like, torch.Tensor) and like.dtype is torch.bfloat16 else value


@contextlib.contextmanager
def limits_of_float32() -> Iterator[None]:
    """Inside, models and operators that ask for the limits of float64 get those of float32, as in their file."""
    real, norm = torch.finfo, torch.rms_norm

    def finfo(dtype: torch.dtype | None = None) -> torch.finfo:
        return real(torch.float32 if dtype in (None, torch.float64) else dtype)

    def rms_norm(x: Any, sizes: Any, weight: Any = None, eps: float | None = None) -> Any:
        return norm(x, sizes, weight, real(torch.float32).eps if eps is None else eps)

    with attribute_set(torch, "finfo", finfo), attribute_set(torch, "rms_norm", rms_norm):
        yield

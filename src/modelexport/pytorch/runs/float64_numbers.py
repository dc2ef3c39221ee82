"""Numbers of a run in float64: what is widened, what half precision rounds, and the limits that a model asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from modelexport.core.replaced_attributes import attribute_set

HALF = (torch.float16, torch.bfloat16)
"""The types that a model in float32 converts to and back: its file rounds to them, and computes in float32."""


def as_float(value: Any) -> Any:
    """A tensor in float64; anything else as it is."""
    return value.double() if isinstance(value, torch.Tensor) else value


def half_type(values: Iterable[Any]) -> torch.dtype | None:
    """The first type of half precision among tensors; ``None`` if they have others."""
    return next((value.dtype for value in values if isinstance(value, torch.Tensor) and value.dtype in HALF), None)


def exact(value: Any) -> Any:
    """A tensor of half precision in float64; anything else as it is."""
    return value.double() if half_type([value]) else value


def by_element(value: Any, half: torch.dtype) -> Any:
    """As an operation by elements takes a tensor beside one of half precision: integers are converted to that type."""
    integers = isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dtype is not torch.bool
    return exact(value.to(half) if integers else value)


def as_narrow(value: Any, like: Any) -> Any:
    """A result in float64, rounded if PyTorch rounds it to half precision."""
    return value.to(half) if (half := half_type([like])) else value


@contextlib.contextmanager
def limits_of(own: torch.dtype) -> Iterator[None]:
    """Inside, models that ask for the limits of float64 get those of their own type, as in their file."""
    real, norm = torch.finfo, torch.rms_norm

    def finfo(dtype: torch.dtype | None = None) -> torch.finfo:
        return real(torch.float32 if dtype is None else own if dtype is torch.float64 else dtype)

    def rms_norm(x: Any, sizes: Any, weight: Any = None, eps: float | None = None) -> Any:
        return norm(x, sizes, weight, real(torch.float32).eps if eps is None else eps)

    with attribute_set(torch, "finfo", finfo), attribute_set(torch, "rms_norm", rms_norm):
        yield


def _grouped_mm(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """The product of groups of rows of a matrix with a matrix each."""
    if offs is None or a.dim() != 2 or b.dim() != 3:  # matrices of one group, or groups of columns
        return torch.ops.aten._grouped_mm.default(a, b, offs, bias, out_dtype)
    ends = offs.tolist()
    rows = zip([0, *ends], ends, b, strict=False)
    products = [a[start:end] @ matrix for start, end, matrix in rows]
    return torch.cat([*products, a.new_zeros(len(a) - ends[-1], b.shape[-1])])


ONLY_NARROW = {torch.ops.aten._grouped_mm.default: _grouped_mm}
"""Operators without a kernel for float64, to the same in other operators."""


def number_of_kernel(func: Any, number: float, half: torch.dtype | None) -> float | None:
    """A number of Python as PyTorch's kernel has it, where a rounding of it changes the result by a whole step: the
    kernel of ``arange`` counts in float64, and that of a remainder in bfloat16 has 0.3008 for 0.3. ``None`` for others.

    Args:
        half: The type of the tensors beside it, if they stay in half precision.
    """
    if half is not None and func in (torch.ops.aten.remainder.Scalar, torch.ops.aten.fmod.Scalar):
        return float(torch.tensor(number, dtype=half).item())
    return number if getattr(func, "overloadpacket", None) is torch.ops.aten.arange else None

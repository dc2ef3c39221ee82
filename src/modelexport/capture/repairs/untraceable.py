"""Functions of PyTorch that no front end can capture as they are: they read values where nothing can follow them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from modelexport.capture.patches import replaced
from modelexport.capture.repairs import attention, quotients, special_functions
from modelexport.capture.repairs.packed_sequences import packed_sequences, unless_packed


@contextmanager
def values_not_read() -> Iterator[None]:
    """Inside, PyTorch itself reads no values in order to warn of them or to refuse them.

    Its distributions do so by default, in Python, and some functions in C++, as packed sequences do with lengths. No
    front end can follow either.
    """
    unchecked = dict.fromkeys(("states", "cells"), unless_packed)
    with replaced({"validation": lambda _: False, **unchecked}), _Rewritten({**_REWRITTEN, **packed_sequences()}):
        yield


@contextmanager
def translatable() -> Iterator[None]:
    """Inside, the same holds, and functions that the TorchScript exporter does not translate are computed by others."""
    with values_not_read(), _Rewritten(_TRANSLATABLE):
        yield


def reading_no_values(capture: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.export.export``, inside of which the same holds: then the code of a model runs.

    The steps after it ask for the shapes and types of tensors a hundred thousand times, and each would be intercepted.
    Strict mode reads what only the code of a graph defines.
    """

    def export(*args: Any, strict: bool = False, **kwargs: Any) -> Any:
        with values_not_read(), replaced({"lazy graphs": lambda _: False} if strict else {}):
            return capture(*args, strict=strict, **kwargs)

    return export


class _Rewritten(TorchFunctionMode):
    """Inside, some functions are computed by others."""

    def __init__(self, functions: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._functions = functions

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._functions.get(func, func)(*args, **(kwargs or {}))


def covariance(input: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """``torch.cov``, which warns of too few observations."""
    x = input.reshape(1, -1) if input.dim() < 2 else input
    if fweights is None and aweights is None:
        x = x - x.mean(1, keepdim=True)
        return (x @ x.mH / max(x.shape[1] - correction, 0)).squeeze()
    weights = [one for one in (fweights, aweights) if one is not None]
    weight = weights[0] * weights[1] if len(weights) == 2 else weights[0]
    total = weight.sum()
    norm = total - correction * (1 if aweights is None else (weight * aweights).sum() / total)
    x = x - ((x * weight).sum(1) / total).unsqueeze(1)
    return (x @ (x * weight).mH / norm.clamp(min=0)).squeeze()


def correlation(input: Any) -> Any:
    """``torch.corrcoef``."""
    found = covariance(input)
    if found.dim() == 0:
        return found / found
    deviation = found.diagonal().real.sqrt() if found.is_complex() else found.diagonal().sqrt()
    found = found / deviation[:, None] / deviation
    if found.is_complex():
        return torch.complex(found.real.clamp(-1, 1), found.imag.clamp(-1, 1))
    return found.clamp(-1, 1)


def combinations(input: Any, r: int = 2, with_replacement: bool = False) -> Any:
    """``torch.combinations``, which selects by a mask of a known number of elements."""
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    return input[torch.tensor(list(choose(range(len(input)), r)), dtype=torch.long).reshape(-1, r)]


def gaussian_loss(*args: Any, **kwargs: Any) -> Any:
    """``gaussian_nll_loss`` without its check that no variance is negative."""
    with replaced({"any": lambda _: lambda condition: False}):
        return torch.nn.functional.gaussian_nll_loss(*args, **kwargs)


_REWRITTEN: Mapping[Any, Callable[..., Any]] = {
    torch.cov: covariance,
    torch.Tensor.cov: covariance,
    torch.corrcoef: correlation,
    torch.Tensor.corrcoef: correlation,
    torch.combinations: combinations,
    torch.nn.functional.gaussian_nll_loss: gaussian_loss,
    torch.linspace: special_functions.spaced,
}


def difference(input: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """``torch.diff``."""
    parts = [one for one in (prepend, input, append) if one is not None]
    x = torch.cat([one if one.dim() else one.expand(_of_one(input.shape, dim)) for one in parts], dim)
    for _ in range(min(n, x.shape[dim])):
        size = x.shape[dim]
        after, before = x.narrow(dim, 1, size - 1), x.narrow(dim, 0, size - 1)
        x = after ^ before if x.dtype == torch.bool else after - before
    return x


def _of_one(shape: Any, dim: int) -> list[int]:
    sizes = list(shape)
    sizes[dim] = 1
    return sizes


def bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    """``torch.bilinear``."""
    left = torch.matmul(input1.unsqueeze(-2).unsqueeze(-2), weight).squeeze(-2)
    product = torch.matmul(left, input2.unsqueeze(-1)).squeeze(-1)
    return product if bias is None else product + bias


def running_sum(input: Any, dim: int, **kwargs: Any) -> Any:
    """``torch.cumsum``, which takes conditions as numbers; ONNX's ``CumSum`` does not."""
    return torch.cumsum(input.long() if input.dtype == torch.bool else input, dim, **kwargs)


def floored_quotient(input: Any, other: Any) -> Any:
    """``torch.floor_divide``, which is truncated; also of sizes, which are scalars of a trace and may be negative."""
    found = quotients.floored_quotient(input, other)
    if found is not NotImplemented:
        return found
    return torch.div(input, other, rounding_mode="floor") if input.dim() else (input - input % other) // other


def remainder(input: Any, other: Any) -> Any:
    """``torch.remainder``, for which the quotient is rounded."""
    found = quotients.remainder(input, other)
    return torch.remainder(input, other) if found is NotImplemented else found


def any_of(input: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.any``, which numbers below one are not true for."""
    return torch.any(input != 0, *args, **kwargs)


_TRANSLATABLE: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.floor_divide, torch.Tensor.floor_divide, torch.Tensor.__floordiv__), floored_quotient),
    **dict.fromkeys((torch.remainder, torch.Tensor.remainder), remainder),
    **dict.fromkeys((torch.atan2, torch.Tensor.atan2, torch.arctan2, torch.Tensor.arctan2), quotients.angle),
    **dict.fromkeys((torch.any, torch.Tensor.any), any_of),
    torch.diff: difference,
    torch.Tensor.diff: difference,
    torch.bilinear: bilinear,
    torch.nn.functional.bilinear: bilinear,
    torch.histc: special_functions.histogram,
    torch.Tensor.histc: special_functions.histogram,
    torch.nn.functional.logsigmoid: special_functions.log_sigmoid,
    torch.nn.functional.scaled_dot_product_attention: attention.traced_attention,
    torch.nn.functional.multi_head_attention_forward: attention.traced_heads,
    torch.cumsum: running_sum,
    torch.Tensor.cumsum: running_sum,
}

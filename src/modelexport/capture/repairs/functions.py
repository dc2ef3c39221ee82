"""Functions of PyTorch that no front end can capture as they are: they read values where nothing can follow them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.export
from torch.overrides import TorchFunctionMode

from modelexport.core.attributes import attribute_set


@contextmanager
def values_not_read() -> Iterator[None]:
    """Inside, PyTorch itself reads no values in order to warn of them or to refuse them.

    Its distributions do so by default, in Python, and some functions in C++. No front end can follow either.
    """
    with attribute_set(torch.distributions.Distribution, "_validate_args", False), _Rewritten():
        yield


@contextmanager
def values_not_read_in_captures() -> Iterator[None]:
    """Inside, the same holds while ``torch.export.export`` runs, which is when the code of a model does.

    The steps after it ask for the shapes and types of tensors a hundred thousand times, and each would be intercepted.
    """
    capture = torch.export.export

    def export(*args: Any, **kwargs: Any) -> Any:
        with values_not_read():
            return capture(*args, **kwargs)

    with attribute_set(torch.export, "export", export):
        yield


class _Rewritten(TorchFunctionMode):
    """Inside, those functions are computed by others."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _REWRITTEN.get(func, func)(*args, **(kwargs or {}))


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
    with attribute_set(torch, "any", lambda condition: False):
        return torch.nn.functional.gaussian_nll_loss(*args, **kwargs)


_REWRITTEN: Mapping[Any, Callable[..., Any]] = {
    torch.cov: covariance,
    torch.Tensor.cov: covariance,
    torch.corrcoef: correlation,
    torch.Tensor.corrcoef: correlation,
    torch.combinations: combinations,
    torch.nn.functional.gaussian_nll_loss: gaussian_loss,
}

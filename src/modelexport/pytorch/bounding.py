"""Operations with bounds, such as ``clamp``: whether there is one that no number of a run reaches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def has_free_bound(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: torch.Tensor, *, new: bool
) -> bool:
    """Whether an operation has a bound that none of its results reach: without it they would be the same.

    Args:
        func: The operation, as PyTorch dispatches it, with its arguments.
        result: What it gave.
        new: Whether that differs from what it took.
    """
    name = getattr(func, "overloadpacket", None)
    if not result.numel():
        return False
    if name in _WITH_OWN_BOUNDS:
        return True
    if name not in _WITH_BOUNDS:
        return False
    given = (*args[1:], *kwargs.values())
    numbers = [one for one in given if isinstance(one, int | float)]
    if not numbers:  # bounds that are tensors, or those that it has where none are given
        return not new
    limits = torch.stack(torch.aminmax(result))
    return any(not bool((limits == one).any()) for one in numbers)


_OPERATIONS = torch.ops.aten
_WITH_BOUNDS = frozenset(
    getattr(_OPERATIONS, name)
    for name in (
        *("clamp", "clamp_", "clamp_max", "clamp_max_", "clamp_min", "clamp_min_", "fmax", "fmin"),
        *("hardtanh", "hardtanh_", "maximum", "minimum"),
    )
)
_WITH_OWN_BOUNDS = frozenset(
    getattr(_OPERATIONS, name) for name in ("hardsigmoid", "hardsigmoid_", "hardswish", "hardswish_")
)
"""Operations whose bounds are not among their arguments."""

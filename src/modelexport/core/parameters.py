"""A function that lists given parameters in its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any


def with_parameters(function: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """Wrap a function so that ``inspect.signature``, which exporters call, lists these parameters."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    vars(forward)["__signature__"] = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    return forward

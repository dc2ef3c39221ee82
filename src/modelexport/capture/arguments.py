"""What both front ends need from a module: its arguments by name, its parameters with all their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


def by_name(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments by name, so that the graph's inputs get those names; unchanged if they cannot be named.

    Unchanged as well if a hook of the model takes positional arguments: PyTorch gives it no others.
    """
    if args and _hooks_take_positions(model):
        return args, kwargs
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):  # the model itself will raise a clearer error
        return args, kwargs
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        match bound.signature.parameters[name].kind:
            case inspect.Parameter.VAR_POSITIONAL | inspect.Parameter.POSITIONAL_ONLY:
                return args, kwargs
            case inspect.Parameter.VAR_KEYWORD:
                named.update(value)
            case _:
                named[name] = value
    return (), named


def _hooks_take_positions(model: nn.Module) -> bool:
    hooks = {*model._forward_pre_hooks, *model._forward_hooks}
    return bool(hooks - {*model._forward_pre_hooks_with_kwargs, *model._forward_hooks_with_kwargs})


def with_parameters(function: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """Wrap a function so that ``inspect.signature``, which exporters call, lists these parameters."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    vars(forward)["__signature__"] = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    return forward


def state_dict_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Every ``state_dict`` key to all keys of the same tensor, itself included: tied parameters have several."""
    tensors = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for key, tensor in tensors.items():
        if torch.is_tensor(tensor):
            names.setdefault(id(tensor), []).append(key)
    return {key: tuple(keys) for keys in names.values() for key in keys}

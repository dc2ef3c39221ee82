"""Nested arguments and results of a model: their tensors by name, and the same structures with other tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

Change = Callable[[str, Any], Any]
"""From the dotted name of a leaf and the leaf to what takes its place."""


def rebuilt(value: Any, change: Change, name: str = "") -> Any:
    """A structure of the same types with other leaves.

    Mappings, lists, tuples and the outputs of transformers and diffusers are followed, and objects that their class
    makes from attributes with tensors (a distribution from its ``parameters``); all else is a leaf.
    """

    def inner(key: object, part: Any) -> Any:
        return rebuilt(part, change, f"{name}.{key}" if name else str(key))

    if isinstance(value, Mapping):
        parts = {key: inner(key, part) for key, part in value.items()}
        return parts if type(value) is dict else type(value)(**parts)
    if isinstance(value, (list, tuple)):
        items = [inner(index, part) for index, part in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if attributes := _made_from(value):
        return type(value)(**{key: inner(key, part) for key, part in attributes.items()})
    return change(name, value)


def _made_from(value: Any) -> dict[str, Any]:
    """The attributes that the class of an object takes to make it, if there are tensors among them."""
    if isinstance(value, (torch.Tensor, torch.Generator, torch.nn.Module, type)) or not hasattr(value, "__dict__"):
        return {}
    try:
        parameters = inspect.signature(type(value)).parameters
    except (TypeError, ValueError):
        return {}
    attributes = {key: vars(value)[key] for key in parameters if key in vars(value)}
    return attributes if any(isinstance(part, torch.Tensor) for part in attributes.values()) else {}


def leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a structure with their dotted names, in order."""
    found: list[tuple[str, Any]] = []

    def note(name: str, leaf: Any) -> Any:
        found.append((name, leaf))
        return leaf

    rebuilt(value, note)
    return iter(found)

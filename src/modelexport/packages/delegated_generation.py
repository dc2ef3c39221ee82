"""Models whose own ``generate`` prepares the inputs of one of their modules, and lets that generate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from modelexport.core.collected_messages import collected
from modelexport.core.replaced_attributes import attribute_set
from modelexport.pytorch.calls.traced_tree import untouched


class _ReachedError(Exception):
    """The module would generate now."""


@dataclass(frozen=True)
class Delegation:
    """What a model's ``generate`` gives to that of one of its modules."""

    path: str
    """The address of the module."""
    arguments: Mapping[str, Any]


def find_delegation(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Delegation | None:
    """The module that generates for a model; ``None`` if the model does that itself."""
    from transformers import GenerationMixin

    inner = {path: module for path, module in model.named_modules() if path and isinstance(module, GenerationMixin)}
    if type(model).generate is GenerationMixin.generate:
        return None
    for path in inner:
        with untouched(model), collected():
            try:
                return Delegation(path, given_to(path, model, inputs))
            except Exception:  # any code of the model
                continue
    return None


def given_to(path: str, model: nn.Module, inputs: Mapping[str, torch.Tensor], **options: Any) -> dict[str, Any]:
    """What a model's ``generate`` gives to that of a module.

    Raises:
        LookupError: It does not call that.
    """
    arguments: dict[str, Any] = {}

    def reached(*args: Any, **kwargs: Any) -> None:
        arguments.update(kwargs)
        raise _ReachedError

    with attribute_set(model.get_submodule(path), "generate", reached):
        try:
            model.generate(**{name: value.clone() for name, value in inputs.items()}, **options)
        except _ReachedError:
            return arguments
    raise LookupError(path)

"""Cases of the tests' table in half precision."""

from __future__ import annotations

from typing import Any

import torch

import models
from modelexport.pytorch.private_torch import tree_map


def built(case: models.ModelCase, dtype: str = "") -> tuple[torch.nn.Module, Any]:
    """The model of a case and its inputs; all their floating-point numbers in another type, if one is named."""
    model, inputs = case.build(), case.inputs()
    if not dtype:
        return model, inputs
    own = getattr(torch, dtype)

    def narrowed(value: Any) -> Any:
        return value.to(own) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return model.to(own), tree_map(narrowed, inputs)

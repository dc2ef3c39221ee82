"""A model that was loaded, whatever named it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelexport.weights.sources import Weights


@dataclass(frozen=True)
class LoadedModel:
    """A module in eval mode, and what is known about it beside its weights."""

    model: torch.nn.Module
    inputs: dict[str, Any] | tuple[Any, ...] | None
    """What the factory returned with the module: keyword arguments, or positional ones."""
    name: str
    """A short name for reports, without any path of this machine."""
    directory: Path | None = None
    """Where a local Hugging Face model lies, with its tokenizer or processor."""
    warnings: tuple[str, ...] = ()
    """What a person should know before trusting the weights, one line each: tensors that the checkpoint lacks, ..."""
    weights: Weights | None = None
    """Where the weights are, if the module was built without them."""

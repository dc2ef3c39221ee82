"""A loaded model, the same for all ways to name one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelexport.weights.sources import Weights


@dataclass(frozen=True)
class LoadedModel:
    """A module in eval mode, with what is known about it."""

    model: torch.nn.Module
    inputs: dict[str, Any] | tuple[Any, ...] | None
    """The inputs that the factory returned with the module: keyword arguments, or positional ones."""
    name: str
    """A short name for reports, without any path of this machine."""
    directory: Path | None = None
    """The folder of a local Hugging Face model, with its tokenizer or processor."""
    warnings: tuple[str, ...] = ()
    """Warnings about the weights, one line each: tensors that the checkpoint lacks, ..."""
    weights: Weights | None = None
    """The places of the weights, if the module was built without them."""

"""A loaded model, the same for all ways to name one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelexport.weights.bytes_of_entries import Weights

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
)
"""The files of a tokenizer or a processor, by all names that transformers uses."""


@dataclass(frozen=True)
class LoadedModel:
    """A module in eval mode, with what is known about it."""

    model: torch.nn.Module
    inputs: dict[str, Any] | tuple[Any, ...] | None
    """The inputs that the factory returned with the module: keyword arguments, or positional ones."""
    name: str
    """A short name for reports, without any path of this machine."""
    directory: Path | None = None
    """The folder of a Hugging Face model, of one of the hub that in the cache, with its tokenizer or processor."""
    warnings: tuple[str, ...] = ()
    """Warnings about the weights, one line each: tensors that the checkpoint lacks, ..."""
    weights: Weights | None = None
    """The places of the weights, if the module was built without them."""
    about: str = ""
    """A line about the model that its class does not tell, for example that it is built in as an example."""

"""Example inputs of models that generate: two rows of tokens, or what an encoder takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from modelexport.errors import InputsError
from modelexport.pytorch.inputs import generate_inputs

PROMPT = 5
"""Tokens of the example prompt: a number that the model's own sizes are unlikely to have."""


def token_inputs(model: nn.Module) -> dict[str, Any]:
    """Two prompts, one padded: otherwise ``generate`` would omit the mask, and a capture would fix the batch."""
    ids = some_tokens(model, torch.Size((2, PROMPT)))
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    return {"input_ids": ids, "attention_mask": mask}


def some_tokens(model: nn.Module, shape: torch.Size) -> torch.Tensor:
    """Tokens that differ, so that a check tells something: a model without its weights generates the first one."""
    vocabulary = int(getattr(model.config.get_text_config(), "vocab_size", 0) or 0)
    if vocabulary < 2:
        raise InputsError(f"{type(model).__name__} has no vocabulary: a package needs a model that takes tokens")
    return torch.arange(shape.numel()).view(shape) % (vocabulary - 1) + 1


def count_tokens(arguments: Mapping[str, Any]) -> int:
    """The number of new tokens that a call of ``forward`` takes for each row."""
    tokens = (arguments.get(name) for name in ("input_ids", "inputs_embeds"))
    return int(next(one.shape[1] for one in tokens if one is not None))


def encoder_inputs(model: nn.Module) -> dict[str, Any]:
    """Example inputs of a model's encoder, in a batch of two."""
    if model.main_input_name == "input_ids":
        inputs = token_inputs(model)
        # Inputs of an encoder are padded on the right.
        return {name: value.flip(1) for name, value in inputs.items()}
    made = generate_inputs(model)
    value = made[model.main_input_name]
    return {model.main_input_name: torch.cat([value, value])[:2]}

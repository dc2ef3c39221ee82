"""A decoder whose cache has a fixed number of positions: each step writes its keys and values at given ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from modelexport.errors import InputsError
from modelexport.packages.generation_loop import CACHE_POSITION, PAST
from modelexport.tools.generate.observed_state import cache_argument, count_tokens, keys_and_values


class _FixedLayer(CacheLayerMixin):
    """Keys and values of all positions; those that no token has taken yet are masked, because they are later ones."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, length: int, positions: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True
        self._length, self._positions = length, positions

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Keys and values are given."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of new tokens; returns those of all positions."""
        self.keys = self.keys.index_copy(2, self._positions, key_states)
        self.values = self.values.index_copy(2, self._positions, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys, and the position of the first."""
        return self._length, 0

    def get_seq_length(self) -> Any:
        """The position of the first new token, a tensor: a capture would make a number a constant."""
        return self._positions[0]

    def get_max_length(self) -> int:
        """The number of positions."""
        return self._length


def fixed_cache_step(length: int, model: nn.Module, /, **inputs: Any) -> dict[str, Any]:
    """A ``forward`` that takes and returns a cache of a fixed number of positions."""
    argument = cache_argument(model)
    positions, layers_before = inputs.pop(CACHE_POSITION), inputs[argument].layers
    for size in (inputs["attention_mask"].shape[1], *(layer.keys.shape[2] for layer in layers_before)):
        torch._check(size == length)
    layers = [_FixedLayer(layer.keys, layer.values, length, positions) for layer in layers_before]
    output = type(model).forward(model, **{**inputs, argument: Cache(layers=layers), "use_cache": True})
    return {"logits": output.logits, PAST: DynamicCache([(layer.keys, layer.values) for layer in layers])}


def fixed_cache_inputs(model: nn.Module, step: Mapping[str, Any], length: int) -> dict[str, Any]:
    """The arguments of a step with a growing cache as those of a step with a cache of a fixed number of positions."""
    argument = cache_argument(model)
    layers, mask = keys_and_values(step.get(argument)), step.get("attention_mask")
    if not layers or mask is None:
        raise InputsError(
            f"{type(model).__name__} has a cache that is not keys and values alone, so its size cannot be fixed: leave "
            f"out --static-cache"
        )
    taken, query = layers[0].keys.shape[2], count_tokens(step)
    if taken + query > length:
        raise InputsError(f"a static cache of {length} positions is too small: give at least {taken + query}")
    missing = length - taken
    cache = DynamicCache(
        [(pad(layer.keys, (0, 0, 0, missing)), pad(layer.values, (0, 0, 0, missing))) for layer in layers]
    )
    positions = torch.arange(taken, taken + query)
    filled = pad(mask, (0, length - mask.shape[1]))
    return {**step, "attention_mask": filled, CACHE_POSITION: positions, argument: cache}

"""Greedy ``generate`` with the logits of every step, and a step's arguments from those of a runtime."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from modelexport.core.collected_messages import collected
from modelexport.core.text import error_line
from modelexport.errors import InputsError, raised_as
from modelexport.packages.generator import CACHE_POSITION, TokenLoop, relative_difference
from modelexport.packages.model_parts import with_forward
from modelexport.packages.states import greedy_config
from modelexport.pytorch.nested_tensors import as_array
from modelexport.pytorch.traced_tree import untouched

_TOLERANCE, _TOLERANCE_OF_HALF = 1e-3, 3e-2


@dataclass(frozen=True)
class Reference:
    """The result of a model's generation from a batch of prompts."""

    inputs: Mapping[str, Any]
    """The padded prompts as arrays, the same for PyTorch and the runtime."""
    tokens: Sequence[Any]
    """The tokens of each step, ``[batch]``."""
    logits: Sequence[Any]
    """The logits of each step, ``[batch, vocabulary]``."""
    eos: frozenset[int]
    pad: int


def generate_greedily(model: nn.Module, prompts: Sequence[Mapping[str, Any]], new_tokens: int) -> Reference:
    """Generate from prompts in one batch, padded on the left.

    Raises:
        InputsError: The model's ``generate`` fails with them.
    """
    from transformers import GenerationMixin

    config = _config(model, new_tokens)
    encodes = bool(model.config.is_encoder_decoder)
    inputs = _batch(prompts, config.pad_token_id, left=not encodes)
    fails = raised_as(lambda error: InputsError(f"{type(model).__name__}.generate fails: {error_line(error)}"))
    with untouched(model), collected(), fails:
        model.generation_config = config  # otherwise its own would fill in unset values
        made = GenerationMixin.generate(model, **{k: torch.from_numpy(v) for k, v in inputs.items()})
    sequences = as_array(made.sequences)
    started = {"decoder_input_ids": sequences[:, : -len(made.logits)]} if encodes else {}
    return Reference(
        inputs | started,
        list(sequences[:, -len(made.logits) :].T),
        [as_array(step) for step in made.logits],
        frozenset(config.eos_token_id or ()),
        config.pad_token_id,
    )


def first_difference(loop: TokenLoop, reference: Reference) -> str:
    """Where the logits of a loop differ from the model's first; empty if they do not.

    Raises:
        UsageError: The loop does not take these prompts, or a part does not run.
    """
    ended = np.zeros(len(reference.tokens[0]), dtype=bool)
    steps = loop.steps(reference.inputs, len(reference.logits), eos=reference.eos, pad=reference.pad)
    for index, (step, right) in enumerate(zip(steps, reference.logits, strict=False)):
        off = relative_difference(step.logits[~ended], right[~ended])
        if not off <= (_TOLERANCE if step.logits.dtype.itemsize > 2 else _TOLERANCE_OF_HALF):
            return f"the logits of token {index + 1} are off by {off:.1e}"
        if not np.array_equal(reference.tokens[index], step.tokens):
            return ""  # a choice among logits that are equal but for rounding; all after it follows
        ended |= np.isin(step.tokens, list(reference.eos))
    return ""


def _config(model: nn.Module, new_tokens: int) -> Any:
    """A greedy configuration with the model's special tokens, without anything that changes logits."""
    own = model.generation_config
    eos = own.eos_token_id if isinstance(own.eos_token_id, (list, tuple)) else [own.eos_token_id]
    ends = sorted({int(token) for token in eos if token is not None})
    pad = own.pad_token_id if own.pad_token_id is not None else next(iter(ends), 0)
    tokens = {"eos_token_id": ends or None, "pad_token_id": int(pad)}
    return greedy_config(model, max_new_tokens=new_tokens, output_logits=True, return_dict_in_generate=True, **tokens)


def _batch(prompts: Sequence[Mapping[str, Any]], pad: int, *, left: bool) -> dict[str, Any]:
    """Prompts of one row each as one batch; tokens are padded, and the mask marks the padding."""
    if "input_ids" not in prompts[0]:
        return {name: np.concatenate([prompt[name] for prompt in prompts]) for name in prompts[0]}
    longest = max(prompt["input_ids"].shape[1] for prompt in prompts)
    ids = np.full((len(prompts), longest), pad, dtype=np.int64)
    mask = np.zeros_like(ids)
    types = {
        name: np.zeros((*ids.shape, *value.shape[2:]), value.dtype)
        for name, value in prompts[0].items()
        if name != "input_ids" and all(prompt[name].shape[:2] == prompt["input_ids"].shape for prompt in prompts)
    }
    for row, prompt in enumerate(prompts):
        length = prompt["input_ids"].shape[1]
        own = slice(longest - length, longest) if left else slice(0, length)
        ids[row, own] = prompt["input_ids"][0]
        mask[row, own] = 1
        for name, padded in types.items():
            padded[row, own] = prompt[name][0]
    others = {
        name: np.concatenate([prompt[name] for prompt in prompts])
        for name in prompts[0].keys() - types.keys() - {"input_ids"}
    }
    return {"input_ids": ids, "attention_mask": mask, **types, **others}


_LAYER = re.compile(r"past_key_values\.(\d+)\.(key|value)")


def step_of(model: nn.Module, feeds: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]] | None:
    """The module and the arguments that a graph's step runs; ``None`` if the cache holds more than keys and values."""
    from transformers import DynamicCache

    layers: dict[int, dict[str, torch.Tensor]] = {}
    inputs: dict[str, Any] = {}
    for name, array in feeds.items():
        if (found := _LAYER.fullmatch(name)) is not None:
            layers.setdefault(int(found[1]), {})[found[2]] = torch.from_numpy(np.array(array))
        elif name.startswith("past_key_values"):
            return None
        else:
            inputs[name] = torch.from_numpy(np.array(array))
    inputs["past_key_values"] = DynamicCache([(one["key"], one["value"]) for _, one in sorted(layers.items())])
    if CACHE_POSITION in inputs:
        from modelexport.packages.fixed_caches import FixedCacheStep

        return with_forward(model, partial(FixedCacheStep, length=layers[0]["key"].shape[2])), inputs
    return model, inputs | {"use_cache": True}

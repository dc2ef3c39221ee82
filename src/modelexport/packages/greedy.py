"""Greedy ``generate`` with the logits of every step, and a step's arguments from those of a runtime."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from modelexport.core.collected_messages import collected
from modelexport.core.text import error_line
from modelexport.errors import InputsError, raised_as
from modelexport.packages.generator import CACHE_POSITION, TokenLoop, relative_difference
from modelexport.packages.model_parts import with_forward
from modelexport.packages.multimodal import Modality, modality_of, types_in
from modelexport.packages.states import greedy_config
from modelexport.pytorch.inputs import generate_inputs
from modelexport.pytorch.nested_tensors import as_array
from modelexport.pytorch.traced_tree import untouched

_TOLERANCE, _TOLERANCE_OF_HALF = 1e-3, 3e-2
_TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "A list of three fruits:",
    "Water boils at one hundred degrees, because the pressure of the air is",
)


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


def example_prompts(
    model: nn.Module, directory: Path | None, *, seed: int = 0, sizes: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Four prompts of different lengths: text tokenized with the model's own tokenizer, or random tokens.

    Args:
        sizes: The size of the images, as in :func:`modelexport.packages.generation_parts.generation_parts`.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)
    modality, _ = modality_of(model, sizes)
    if modality is not None:
        return _with_features(modality, vocabulary, seed)
    rows = _tokenized(directory, vocabulary)
    if not rows:
        generator = np.random.default_rng(seed)
        rows = [generator.integers(min(3, vocabulary - 1), vocabulary, size=(1, n)) for n in (5, 12, 1, 8)]
    if model.config.is_encoder_decoder and model.main_input_name != "input_ids":
        made = encoder_inputs(model)[model.main_input_name]
        draw = torch.Generator().manual_seed(seed)
        return [
            {model.main_input_name: as_array(torch.randn(made[:1].shape, generator=draw, dtype=made.dtype))}
            for _ in rows
        ]
    return [{"input_ids": row} for row in rows]


def _with_features(modality: Modality, vocabulary: int, seed: int) -> list[dict[str, Any]]:
    """Prompts of different lengths, each with its own image or sound and random tokens after its placeholders."""
    generator = np.random.default_rng(seed)
    example = as_array(modality.example["input_ids"])
    last = int(np.flatnonzero((example == modality.token).any(axis=0))[-1]) + 1
    prompts = []
    for length in (5, 2, 9):
        words = generator.integers(3, vocabulary, size=(1, length))
        words[words == modality.token] = 3
        taken = {
            name: generator.standard_normal(tensor.shape).astype(as_array(tensor).dtype)
            if tensor.is_floating_point()
            else as_array(tensor)
            for name, tensor in modality.of_one.items()
        }
        ids = np.concatenate([example[:1, :last], words], axis=1)
        types = {name: (ids == modality.token).astype(np.int32) for name in types_in(modality.example)}
        prompts.append({"input_ids": ids, **types, **taken})
    return prompts


def _tokenized(directory: Path | None, vocabulary: int) -> list[Any]:
    if directory is None or not any(directory.glob("tokenizer*")):
        return []
    from transformers import AutoTokenizer

    with collected():
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
            rows = [np.asarray([tokenizer(text)["input_ids"]], dtype=np.int64) for text in _TEXTS]
        except Exception:  # a tokenizer whose package is not installed is not a reason to fail
            return []
    return rows if all(row.size and row.max() < vocabulary for row in rows) else []


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
        name: np.zeros(ids.shape, value.dtype)
        for name, value in prompts[0].items()
        if name != "input_ids" and value.shape == prompts[0]["input_ids"].shape
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


def encoder_inputs(model: nn.Module) -> dict[str, Any]:
    """Example inputs of a model's encoder, in a batch of two."""
    if model.main_input_name == "input_ids":
        inputs = token_inputs(model)
        # Inputs of an encoder are padded on the right.
        return {name: value.flip(1) for name, value in inputs.items()}
    made = generate_inputs(model)
    value = made[model.main_input_name]
    return {model.main_input_name: torch.cat([value, value])[:2]}

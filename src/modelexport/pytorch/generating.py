"""What ``generate`` gives, greedily, with the logits of every step; and a step's arguments from a runtime's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from modelexport.core.quiet import quiet
from modelexport.errors import InputsError
from modelexport.pytorch.model_run import as_array
from modelexport.pytorch.traced import untouched

_TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "A list of three fruits:",
    "Water boils at one hundred degrees, because the pressure of the air is",
)


@dataclass(frozen=True)
class Reference:
    """What a model generates from a batch of prompts."""

    inputs: Mapping[str, Any]
    """Arrays: the prompts, padded, as both get them."""
    tokens: Sequence[Any]
    """Of each step, ``[batch]``."""
    logits: Sequence[Any]
    """Of each step, ``[batch, vocabulary]``."""
    eos: frozenset[int]
    pad: int


def example_prompts(model: nn.Module, directory: Path | None, *, seed: int = 0) -> list[dict[str, Any]]:
    """Four prompts of different lengths: text in the tokens of the model's own tokenizer, or random tokens."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    rows = _tokenized(directory, vocabulary)
    if not rows:
        generator = np.random.default_rng(seed)
        rows = [generator.integers(min(3, vocabulary - 1), vocabulary, size=(1, n)) for n in (5, 12, 1, 8)]
    return [{"input_ids": row} for row in rows]


def _tokenized(directory: Path | None, vocabulary: int) -> list[Any]:
    if directory is None or not any(directory.glob("tokenizer*")):
        return []
    from transformers import AutoTokenizer

    with quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
            rows = [np.asarray([tokenizer(text)["input_ids"]], dtype=np.int64) for text in _TEXTS]
        except Exception:  # a tokenizer of a package that is not installed is no reason to fail
            return []
    return rows if all(row.size and row.max() < vocabulary for row in rows) else []


def generate_greedily(model: nn.Module, prompts: Sequence[Mapping[str, Any]], new_tokens: int) -> Reference:
    """Generate from prompts in one batch, padded left.

    Raises:
        InputsError: The model's ``generate`` does not take them.
    """
    from transformers import GenerationConfig

    own = model.generation_config
    eos = own.eos_token_id if isinstance(own.eos_token_id, (list, tuple)) else [own.eos_token_id]
    ends = frozenset(int(token) for token in eos if token is not None)
    pad = own.pad_token_id if own.pad_token_id is not None else next(iter(sorted(ends)), 0)
    inputs = _padded(prompts, int(pad))
    config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=new_tokens,
        bos_token_id=own.bos_token_id,
        eos_token_id=sorted(ends) or None,
        pad_token_id=int(pad),
        decoder_start_token_id=own.decoder_start_token_id,
        output_logits=True,
        return_dict_in_generate=True,
    )
    failure: Exception | None = None
    with untouched(model), quiet():
        try:
            made = model.generate(**{k: torch.from_numpy(v) for k, v in inputs.items()}, generation_config=config)
        except Exception as error:
            failure = error
    if failure is not None:
        reason = " ".join(str(failure).split())[:240]
        raise InputsError(f"{type(model).__name__}.generate fails: {type(failure).__name__}: {reason}") from failure
    new = as_array(made.sequences)[:, -len(made.logits) :]
    return Reference(inputs, list(new.T), [as_array(step) for step in made.logits], ends, int(pad))


def _padded(prompts: Sequence[Mapping[str, Any]], pad: int) -> dict[str, Any]:
    """Prompts of one row each as one batch; tokens are padded left, and the mask says where."""
    longest = max(prompt["input_ids"].shape[1] for prompt in prompts)
    ids = np.full((len(prompts), longest), pad, dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        length = prompt["input_ids"].shape[1]
        ids[row, longest - length :] = prompt["input_ids"][0]
        mask[row, longest - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


_LAYER = re.compile(r"past_key_values\.(\d+)\.(key|value)")


def step_inputs(model: nn.Module, feeds: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of ``forward`` for what a graph got; ``None`` where its cache is not keys and values alone."""
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
    cache = DynamicCache()
    for index in sorted(layers):
        cache.update(layers[index]["key"], layers[index]["value"], index)
    return inputs | {"past_key_values": cache, "use_cache": True}

"""Greedy ``generate`` with the logits of every step, and loops compared with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from modelexport.core.text import error_line
from modelexport.errors import InputsError, raised_as
from modelexport.packages.generation_loop import Step, TokenLoop
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.nested_tensors import as_array
from modelexport.pytorch.pretrained import PretrainedModel
from modelexport.tools.generate.observed_state import greedy_config
from modelexport.tools.generate.prompts import MASK
from modelexport.traces.array_differences import relative_error
from modelexport.traces.tolerances import allowed_of_logits


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


def generate_greedily(model: PretrainedModel, prompts: Sequence[Mapping[str, Any]], new_tokens: int) -> Reference:
    """Generate from prompts in one batch, padded on the left.

    Raises:
        InputsError: The model's ``generate`` fails with them.
    """
    from transformers import GenerationMixin

    settings = model.generation_config
    eos = settings.eos_token_id if isinstance(settings.eos_token_id, (list, tuple)) else [settings.eos_token_id]
    ends = sorted({int(token) for token in eos if token is not None})
    pad = -1 if settings.pad_token_id is None else int(settings.pad_token_id)
    pad = pad if pad >= 0 else next(iter(ends), 0)  # some configurations say -1 for none
    asked = {"max_new_tokens": new_tokens, "output_logits": True, "return_dict_in_generate": True}
    config = greedy_config(model, **asked, eos_token_id=ends or None, pad_token_id=pad)
    encodes = bool(model.config.is_encoder_decoder)
    inputs = _batch(prompts, pad, left=not encodes)
    fails = raised_as(lambda error: InputsError(f"{type(model).__name__}.generate fails: {error_line(error)}"))
    with untouched(model), fails:
        model.generation_config = config  # otherwise its own would fill in unset values
        tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
        output = GenerationMixin.generate(model, **tensors)
    sequences = as_array(output.sequences)
    started = {"decoder_input_ids": sequences[:, : -len(output.logits)]} if encodes else {}
    return Reference(
        inputs | started,
        list(sequences[:, -len(output.logits) :].T),
        [as_array(step) for step in output.logits],
        frozenset(ends),
        pad,
    )


def compared(loop: TokenLoop, reference: Reference) -> Iterator[tuple[Step, Any, Any]]:
    """The steps of a loop up to the first at which a row has another token, which the later ones follow from.

    Yields:
        The step, the model's logits of the rows that have not ended, and the loop's.

    Raises:
        UsageError: The loop does not take these prompts, or a part does not run.
    """
    ended = np.zeros(len(reference.tokens[0]), dtype=bool)
    steps = loop.steps(reference.inputs, len(reference.logits), eos=reference.eos, pad=reference.pad)
    for step, tokens, logits in zip(steps, reference.tokens, reference.logits, strict=False):
        yield step, logits[~ended], step.logits[~ended]
        if not np.array_equal(tokens, step.tokens):
            return
        ended |= np.isin(tokens, list(reference.eos))


def first_difference(loop: TokenLoop, reference: Reference) -> str:
    """Where the logits of a loop differ from the model's first; empty if they do not.

    Another token is not a difference if logits agree: it is a choice among logits that are equal but for rounding.
    """
    for index, (_, right, computed) in enumerate(compared(loop, reference)):
        off = relative_error(right, computed)
        if not off <= allowed_of_logits(computed.dtype.itemsize):
            return f"the logits of token {index + 1} are off by {off:.1e}"
    return ""


def _batch(prompts: Sequence[Mapping[str, Any]], pad: int, *, left: bool) -> dict[str, Any]:
    """Prompts of one row each as one batch; what is there for each token is padded, and the mask marks the padding."""
    ids = [np.asarray(prompt["input_ids"], np.int64) for prompt in prompts if "input_ids" in prompt]
    masks = list(map(np.ones_like, ids)) or [prompt[MASK] for prompt in prompts if MASK in prompt]
    longest, batch = max((mask.shape[1] for mask in masks), default=0), {}
    for name in dict.fromkeys((*chain(*prompts), *([MASK] if masks else []))):  # some may have no image
        given = [prompt[name] for prompt in prompts if name in prompt]
        rows = ids if name == "input_ids" else masks if name == MASK else given
        if len(masks) == len(rows) and all(row.shape[:2] == mask.shape for row, mask in zip(rows, masks, strict=True)):
            missing = [longest - row.shape[1] for row in rows]
            widths = [((0, 0), (count, 0) if left else (0, count)) for count in missing]
            fill = pad if name == "input_ids" else 0
            rows = [
                np.pad(row, [*width, *[(0, 0)] * (row.ndim - 2)], constant_values=fill)
                for row, width in zip(rows, widths, strict=True)
            ]
        batch[name] = np.concatenate(rows)
    return batch

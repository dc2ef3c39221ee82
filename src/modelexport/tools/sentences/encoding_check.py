"""Compares the embeddings of texts that a package computes with those of sentence-transformers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modelexport.packages.model_parts import TEXTS
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.nested_tensors import as_array
from modelexport.runtime.sessions import input_names, open_session, run_session
from modelexport.tools.sentences.sentence_pipelines import SENTENCE, SentencePipeline, pipeline_parts
from modelexport.traces.array_differences import relative_error
from modelexport.traces.tolerances import allowed_of_logits

_PROMPT = "Represent this sentence for searching: "
_SIDES = ("right", "left")


def encoding_fault(model: SentencePipeline, file: Path, notes: list[str]) -> str:
    """Where the embeddings of texts differ from those of ``encode``, with and without a prompt, together and alone,
    padded on each side; empty if they do not.

    Args:
        notes: A note is appended to it if there is no tokenizer, and generated tokens are compared instead.
    """
    session = open_session(file, optimized=True)
    names = input_names(session)
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    with untouched(model):
        has_tokenizer = bool(model.library[0].preprocess(list(TEXTS))["input_ids"].numel())
        if not has_tokenizer:
            notes.append("the folder has no tokenizer: embeddings of generated tokens were compared, not of texts")
        for batch, features, right in _batches(model) if has_tokenizer else _batches_of_tokens(model):
            feeds: dict[str, Any] = {"prompt_length": np.array(0), **features}
            embeddings = run_session(session, {name: np.asarray(feeds[name], np.int64) for name in names})[model.output]
            kept = np.asarray(features["attention_mask"], bool) if model.output != SENTENCE else slice(None)
            off = relative_error(right[kept], embeddings[kept])
            if not off <= allowed_of_logits(dtype.itemsize):
                return f"{model.output} of {batch} is off by {off:.1e} of what sentence-transformers computes"
    return ""


def _batches_of_tokens(model: SentencePipeline) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
    """The same for generated tokens, padded on each side."""
    inputs: Any = pipeline_parts(model)[0].inputs
    for side in _SIDES:
        mask = torch.ones_like(inputs["attention_mask"])
        mask[0, slice(-2, None) if side == "right" else slice(2)] = 0
        features = {name: int(value) if value.ndim == 0 else value for name, value in inputs.items()}
        features["attention_mask"] = mask
        with torch.no_grad():
            right = as_array(model.library[0](dict(features))[model.output])[..., : model.width]
        yield f"generated tokens padded on the {side}", features, right


def _batches(model: SentencePipeline) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
    """What a batch is, what the library makes of it for the model, and its embeddings."""
    library = model.library[0]
    usual = library.tokenizer.padding_side
    try:
        for side, texts, prompt in itertools.product(_SIDES, (TEXTS, TEXTS[:1]), ("", _PROMPT)):
            library.tokenizer.padding_side = side
            features = library.preprocess(list(texts), prompt=prompt or None)
            if model.output == SENTENCE:
                dense = {"convert_to_sparse_tensor": False} if model.is_sparse else {}
                how = {"prompt": prompt or None, "show_progress_bar": False, "convert_to_tensor": True, **dense}
                right = as_array(library.encode(list(texts), **how))
            else:
                with torch.no_grad():
                    right = as_array(library(dict(features))[model.output])
            batch = f"{len(texts)} texts padded on the {side}" if len(texts) > 1 else "a text"
            yield f"{batch} with a prompt" if prompt else batch, features, right
    finally:
        library.tokenizer.padding_side = usual

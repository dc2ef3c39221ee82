"""Compares the embeddings of texts that a package computes with those of sentence-transformers or of PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modelexport.core.collected_messages import collected
from modelexport.core.text import error_line
from modelexport.packages.model_parts import TEXTS
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.nested_tensors import as_array
from modelexport.runtime.sessions import input_names, open_session, run_session
from modelexport.tools.sentences.sentence_pipelines import SENTENCE, SentencePipeline, Transformer
from modelexport.tools.sentences.sentence_settings import read_model_settings
from modelexport.traces.array_differences import relative_error
from modelexport.traces.tolerances import allowed_of_logits

_PROMPT = "Represent this sentence for searching: "
_SIDES = ("right", "left")


def encoding_fault(model: SentencePipeline, file: Path, directory: Path | None, notes: list[str]) -> str:
    """Where embeddings of texts differ, with and without a prompt, together and alone, padded on each side; empty if
    they do not.

    Args:
        directory: The folder of the model. With a tokenizer in it, and if sentence-transformers is installed, the
            embeddings are compared with those of ``encode``.
        notes: Gets why they are not.
    """
    session = open_session(file, optimized=True)
    names = input_names(session)
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    with untouched(model), collected():
        library = _library(directory, dtype, notes)
        batches = _of_library(library, model.output) if library is not None else _of_modules(model)
        for batch, features, right in batches:
            feeds: dict[str, Any] = {"prompt_length": np.array(0), **features}
            embeddings = run_session(session, {name: np.asarray(feeds[name], np.int64) for name in names})[model.output]
            kept = np.asarray(features["attention_mask"], bool) if model.output != SENTENCE else slice(None)
            off = relative_error(right[kept], embeddings[kept])
            if not off <= allowed_of_logits(dtype.itemsize):
                whose = "sentence-transformers" if library is not None else "PyTorch"
                return f"{model.output} of {batch} is off by {off:.1e} of what {whose} computes"
    return ""


def _library(directory: Path | None, dtype: torch.dtype, notes: list[str]) -> Any:
    """The model as sentence-transformers loads it; ``None`` if it is not installed, or does not load it."""
    try:
        import sentence_transformers  # type: ignore[import-not-found]

        assert directory is not None, "the model has no folder"
        kind = getattr(sentence_transformers, read_model_settings(directory).model_type)
        return kind(str(directory), device="cpu", local_files_only=True, model_kwargs={"dtype": dtype})
    except ImportError:
        return None
    except Exception as error:  # a folder without a tokenizer, or code that is not trusted
        notes.append(f"embeddings were not compared with those of sentence-transformers: {error_line(error)}")
        return None


def _of_library(library: Any, output: str) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
    """What a batch is, what the library makes of it for the model, and its embeddings."""
    for side, texts, prompt in itertools.product(_SIDES, (TEXTS, TEXTS[:1]), ("", _PROMPT)):
        library.tokenizer.padding_side = side
        features = library.preprocess(list(texts), prompt=prompt or None)
        if output == SENTENCE:
            right = library.encode(list(texts), prompt=prompt or None, show_progress_bar=False)
        else:
            right = as_array(library(dict(features))[output])
        batch = f"{len(texts)} texts padded on the {side}" if len(texts) > 1 else "a text"
        yield f"{batch} with a prompt" if prompt else batch, features, right


def _of_modules(model: SentencePipeline) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
    """The same with random tokens and our own modules."""
    config: Any = next(array for array in model.children() if isinstance(array, Transformer)).auto_model.config
    random = np.random.default_rng(1)
    for side, lengths, prompt in itertools.product(_SIDES, ((9, 4, 6), (7,)), (0, 2)):
        places = np.arange(max(lengths))[None]
        mask = (places < np.array(lengths)[:, None]).astype(np.int64)
        mask = mask if side == "right" else mask[:, ::-1].copy()
        ids = random.integers(1, config.get_text_config().vocab_size, mask.shape) * mask
        features = {"input_ids": ids, "attention_mask": mask, "prompt_length": np.array(prompt)}
        taken = {name: torch.from_numpy(array) for name, array in features.items()}
        if not model.takes_prompt_length:
            del taken["prompt_length"]
        batch = f"{len(lengths)} texts padded on the {side}" if len(lengths) > 1 else "a text"
        yield f"{batch} with a prompt of {prompt} tokens", features, as_array(model(**taken)[model.output])

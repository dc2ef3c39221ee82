"""Example inputs and prompts of models that generate: tokens, and the images or the sound that belong to them."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modelexport.core.collected_messages import collected
from modelexport.errors import InputsError
from modelexport.format.package_manifest import Manifest
from modelexport.packages.generation_loop import IMAGE_SIZES
from modelexport.packages.model_parts import TEXTS
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.inputs.generated_inputs import generate_inputs
from modelexport.pytorch.nested_tensors import as_array
from modelexport.pytorch.pretrained import PretrainedModel

KINDS = ("image", "audio")
PROMPT = 5
"""Tokens of the example prompt: a number that the model's own sizes are unlikely to have."""
MASK, PIXEL_MASK = "attention_mask", "pixel_attention_mask"
"""The inputs that are masks: of the tokens that are not padding, and of such pixels of an image."""
_CHANGES = re.compile("(sliding_window|window_size|chunk_size|original_max_position_embeddings)$")
"""Settings of a number of tokens beyond which a model computes differently."""
_LONGEST = 256


def token_inputs(model: PretrainedModel) -> dict[str, Any]:
    """Two prompts, one padded. With one prompt, ``generate`` would omit the mask, and a capture would fix the batch."""
    ids = some_tokens(model, torch.Size((2, PROMPT)))
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    return {"input_ids": ids, "attention_mask": mask}


def some_tokens(model: PretrainedModel, shape: torch.Size) -> torch.Tensor:
    """Tokens that differ from each other. A model without its weights always generates the first one, which a check
    must notice.
    """
    return torch.arange(shape.numel()).view(shape) % (vocabulary_of(model) - 1) + 1


def vocabulary_of(model: PretrainedModel) -> int:
    """The number of tokens that a model knows; if its encoder knows fewer, that number."""
    encodes = bool(model.config.is_encoder_decoder)
    configs = [model.config.get_text_config(decoder=encodes or None)]
    configs += [model.get_encoder().config] if encodes else []
    size = min((int(size) for config in configs if (size := getattr(config, "vocab_size", None))), default=0)
    if size < 2:
        raise InputsError(f"{type(model).__name__} has no vocabulary: a package needs a model that takes tokens")
    return size


@dataclass(frozen=True)
class Example:
    """Two prompts, with an image or a sound each if the model takes them."""

    inputs: Mapping[str, torch.Tensor]
    head: int = 0
    """The tokens of a prompt up to its last placeholder, with which every prompt has to begin."""
    user_inputs: Collection[str] = ()
    """The inputs that were given, so that others cannot be drawn."""

    @property
    def beside(self) -> list[str]:
        """The names of the images or sounds, and of what belongs to them."""
        return [name for name in self.inputs if name not in ("input_ids", MASK, "decoder_input_ids")]


def has_processor(directory: Path | None) -> bool:
    """Whether a model's folder has what makes the inputs for its images or sounds."""
    return directory is not None and any(directory.glob("*processor_config.json"))


def example_of(
    model: PretrainedModel, user_inputs: Mapping[str, Any] | None = None, *, masks_pixels: bool = False
) -> Example:
    """An example of what a model takes for prompts.

    Args:
        user_inputs: The inputs for the image or sound of one prompt, if they cannot be made.
        masks_pixels: Whether images come from a processor, which says what of them is padding if the model takes that.
    """
    text = Example(token_inputs(model))
    if others_than_text(model) == [] and not user_inputs:
        return text
    of_one_prompt = {name: torch.as_tensor(value) for name, value in (user_inputs or {}).items()}
    spec = {name: {"value": torch.cat([value, value]).tolist()} for name, value in of_one_prompt.items()}
    with collected():
        inputs = generate_inputs(model, spec=spec, grids=True)
        if not inputs.keys() - text.inputs.keys():
            return text
        ids = inputs["input_ids"]
        tokens = [token for kind in KINDS if (token := placeholder_of(model.config, kind)) is not None]
        placeholder = torch.isin(ids, torch.tensor(tokens, dtype=ids.dtype))
        head = int(placeholder.any(0).nonzero().max()) + 1 if placeholder.any() else 0
        inputs["attention_mask"] = torch.ones_like(ids)
        parameters = inspect.signature(model.generate).parameters
        if "input_ids" in parameters:  # one of the model's own, which names all that it takes
            inputs = {name: value for name, value in inputs.items() if name in parameters}
        if head:
            inputs |= _mask_of_pixels(model, inputs) if masks_pixels else {}
            inputs |= _types(model, inputs, placeholder)
    return Example(inputs, head, of_one_prompt.keys())


def others_than_text(model: PretrainedModel) -> list[str]:
    """The modalities that a model of transformers declares, such as ``image``, without text."""
    modalities = getattr(model, "input_modalities", "text")
    return [
        modality for modality in ([modalities] if isinstance(modalities, str) else modalities) if modality != "text"
    ]


def _types(model: PretrainedModel, inputs: Mapping[str, Any], placeholder: torch.Tensor) -> dict[str, torch.Tensor]:
    """The argument ``…token_type_ids`` that marks the tokens of images, if it changes what the model computes."""
    names = [
        parameter for parameter in inspect.signature(model.forward).parameters if parameter.endswith("token_type_ids")
    ]
    with untouched(model, runs=False):
        for name in (parameter for parameter in names if parameter not in inputs):
            without = model(**copy.deepcopy(dict(inputs))).logits
            for values in (torch.zeros_like(placeholder), placeholder):
                types = {name: values.long()}
                if not torch.equal(model(**copy.deepcopy(dict(inputs)), **types).logits, without):
                    return types
    return {}


def _mask_of_pixels(model: PretrainedModel, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A mask of pixels with padding at the bottom of each image, if the model takes one and runs with it."""
    pixels, name = inputs.get("pixel_values"), PIXEL_MASK
    if pixels is None or name in inputs or name not in inspect.signature(model.forward).parameters:
        return {}
    mask = torch.ones_like(pixels[..., 0, :, :], dtype=torch.long)
    mask[..., -(mask.shape[-2] // 4) :, :] = 0
    with untouched(model, runs=False), suppress(Exception):  # the code of a model may raise anything
        model(**copy.deepcopy(dict(inputs)), **{name: mask})
        return {name: mask}
    return {}


def placeholder_of(config: Any, kind: str) -> int | None:
    values = (getattr(config, f"{kind}_token_{name}", None) for name in ("id", "index"))
    return next((value for value in values if isinstance(value, int)), None)


def encoder_inputs(model: PretrainedModel, user_inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Example inputs of a model's encoder, in a batch of two; one row has padding, if the encoder takes a mask.

    Args:
        user_inputs: Those of one row, where they cannot be made.
    """
    if user_inputs:
        return {
            name: torch.cat([value, value])
            for name, entry in user_inputs.items()
            if (value := torch.as_tensor(entry)).ndim
        }
    if model.main_input_name == "input_ids":
        inputs = token_inputs(model)
        # Inputs of an encoder are padded on the right.
        return {name: value.flip(1) for name, value in inputs.items()}
    encoder, name = model.get_encoder(), model.main_input_name
    takes = inspect.signature(encoder.forward).parameters
    name = name if name in takes else encoder.main_input_name
    value = generate_inputs(encoder)[name]
    inputs = {name: torch.cat([value, value])[:2]}
    mask = torch.ones(value.shape[:2], dtype=torch.long)
    mask[0, -(mask.shape[1] // 4) :] = 0
    return inputs | ({MASK: mask} if MASK in takes and _reads_mask(encoder, inputs, mask) else {})


def _reads_mask(encoder: Any, inputs: Mapping[str, Any], mask: torch.Tensor) -> bool:
    """Whether an encoder computes with a mask that says which frames of a sound are not padding."""
    with untouched(encoder, runs=False), suppress(Exception):  # its code may raise anything
        encoder(**inputs, **{MASK: mask})
        try:
            encoder(**inputs, **{MASK: mask.to("meta")})
        except Exception:  # a tensor without values cannot be computed with
            return True
    return False


def example_prompts(
    model: PretrainedModel,
    directory: Path | None,
    *,
    seed: int = 0,
    user_inputs: Mapping[str, Any] | None = None,
    manifest: Manifest | None = None,
) -> list[dict[str, Any]]:
    """Prompts of different lengths: text tokenized with the model's own tokenizer, or random tokens, with images.

    Args:
        user_inputs: As in :func:`example_of`; for a model with an encoder what this takes.
        manifest: Of a package, which may take text only.
    """
    if model.config.is_encoder_decoder and model.main_input_name != "input_ids":
        inputs = encoder_inputs(model, user_inputs)
        if manifest is not None and all(MASK not in part.inputs for part in manifest.parts):
            inputs.pop(MASK, None)
        prompts = []
        for index in range(4):  # sounds of other lengths, if a mask can mark what is missing
            shorter = index if MASK in inputs and not user_inputs else 0
            row = {name: value[:1, : value.shape[1] * (8 - shorter) // 8] for name, value in inputs.items()}
            mask = {name: as_array(value) for name, value in row.items() if name == MASK}
            prompts += prompts_like(model, Example(row, user_inputs=user_inputs or ()), (0,), seed + index)
            prompts[-1] |= mask
        return prompts
    parts = manifest.parts if manifest is not None else ()
    masked = any(PIXEL_MASK in part.inputs for part in parts) if parts else has_processor(directory)
    example = example_of(model, user_inputs, masks_pixels=masked)
    past = _lengths_before_a_change(model.config.get_text_config(decoder=True).to_dict())
    if example.beside and (manifest is None or any(name in part.inputs for part in parts for name in example.beside)):
        lengths = (5, *past, 2, 9)
        sizes = [name for name in example.beside if name in IMAGE_SIZES and any(name in part.inputs for part in parts)]
        if not sizes or {*example.user_inputs} - {*sizes}:
            return prompts_like(model, example, lengths, seed)
        examples = itertools.cycle(with_images(model, example, sizes[0], count) for count in (1, 2, 0))
        pairs = zip(examples, lengths, strict=False)
        return [prompts_like(model, each, (length,), seed + length)[0] for each, length in pairs]
    rows = [{"input_ids": row} for row in _tokenized(directory, vocabulary_of(model))]
    lengths = past if rows else (5, *past, 12, 1, 8)
    return rows + prompts_like(model, Example(token_inputs(model)), lengths, seed)


def _lengths_before_a_change(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Lengths of prompts whose continuation gets longer than a window, or than what positions were made for."""
    numbers = {**settings, **(settings.get("rope_parameters") or {})}
    changes = {size for name, size in numbers.items() if _CHANGES.search(name) and type(size) is int}
    return tuple(sorted(size - 2 for size in changes if 3 < size <= _LONGEST))


def prompts_like(model: PretrainedModel, example: Example, lengths: Sequence[int], seed: int) -> list[dict[str, Any]]:
    """Prompts of one row each: what an example begins with, random tokens after it, and other images or sounds."""
    random, vocabulary = np.random.default_rng(seed), vocabulary_of(model)
    arrays = {name: as_array(value) for name, value in example.inputs.items() if name != "attention_mask"}
    ids, prompts = arrays.get("input_ids"), []
    for length in lengths:
        prompt = {}
        for name, array in arrays.items():
            if ids is not None and array.shape[:2] == ids.shape:
                after = array[:1, -1:].repeat(length, 1)
                if name == "input_ids":
                    after = random.integers(min(3, vocabulary - 1), vocabulary, size=(1, length))
                    after[np.isin(after, ids[:, : example.head])] = ids[0, -1]
                prompt[name] = np.concatenate([array[:1, : example.head], after], axis=1)
            else:
                of_one_prompt = array[: len(array) // len(ids)] if ids is not None else array
                drawn = np.issubdtype(of_one_prompt.dtype, np.floating) and name not in example.user_inputs
                prompt[name] = (
                    random.standard_normal(of_one_prompt.shape).astype(of_one_prompt.dtype) if drawn else of_one_prompt
                )
        prompts.append(prompt)
    return prompts


def with_images(model: PretrainedModel, example: Example, name: str, count: int) -> Example:
    """An example of one prompt with another number of images, of unlike sizes.

    Args:
        name: What gives the sizes of images in patches.
    """
    inputs = {
        key: value[:1] if value.shape[:1] == example.inputs["input_ids"].shape[:1] else value
        for key, value in example.inputs.items()
    }
    ids, size = inputs["input_ids"], inputs[name][0]
    placeholder = torch.eq(ids, placeholder_of(model.config, KINDS[0]) or 0)
    first = int(placeholder[0].nonzero()[0])
    merged = math.isqrt(int(size.prod()) // int(placeholder.sum()))
    # One axis of each further image is longer.
    sizes = [size + 2 * merged * torch.tensor([0, at % 2, at // 2]) for at in range(count)]
    columns = [*range(first)]
    for each in sizes:
        columns += [first] * (int(each.prod()) // merged**2) + [-1]
    of_tokens = {key: value[:, columns or [-1]] for key, value in inputs.items() if value.shape[:2] == ids.shape}
    if not count:
        return Example(of_tokens, max(first, 1), example.user_inputs)
    rows = torch.arange(int(torch.stack(sizes).prod(-1).sum()))
    beside = {key: value[rows % len(value)] for key, value in inputs.items() if key not in of_tokens}
    return Example(beside | {name: torch.stack(sizes)} | of_tokens, len(columns) - 1, example.user_inputs)


def _tokenized(directory: Path | None, vocabulary: int) -> list[Any]:
    if directory is None or not any(directory.glob("tokenizer*")):
        return []
    from transformers import AutoTokenizer

    with collected():
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
            rows = [np.asarray([tokenizer(text)["input_ids"]], dtype=np.int64) for text in TEXTS]
        except Exception:  # a tokenizer whose package is not installed is not a reason to fail
            return []
    return rows if all(row.size and row.max() < vocabulary for row in rows) else []

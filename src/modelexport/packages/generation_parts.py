"""The forward passes that ``generate`` runs, recorded and turned into parts that an exporter can capture.

A part is the whole model with another ``forward``, so that every module keeps its path in the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from modelexport.core.collected_messages import collected
from modelexport.core.text import error_line
from modelexport.errors import CaptureError, InputsError, UsageError, raised_as
from modelexport.packages.generator import CACHE_POSITION
from modelexport.packages.model_parts import ModelPart, with_forward, with_weights
from modelexport.packages.multimodal import (
    EMBEDDING,
    EMBEDS,
    PLURALS,
    POSITIONS,
    Encode,
    Merge,
    Modality,
    Place,
    modality_of,
)
from modelexport.packages.prompts import (
    Example,
    encoder_inputs,
    example_of,
    others_than_text,
    some_tokens,
    token_inputs,
)
from modelexport.packages.stateful_parts import stateful_parts
from modelexport.packages.states import count_tokens, find_state, greedy_config, keys_and_values, record_calls
from modelexport.pytorch.pretrained import is_pretrained
from modelexport.pytorch.traced_tree import untouched
from modelexport.weights.sources import Weights


def can_generate(model: nn.Module) -> bool:
    """Whether a transformers model has a working ``generate``."""
    return is_pretrained(model) and bool(model.can_generate())


@dataclass(frozen=True, kw_only=True)
class DecoderForm:
    """The form of the graphs of a decoder."""

    static_cache: int | None = None
    """The number of positions of the cache; ``None``: it grows."""
    separate_prefill: bool = False
    """A graph for the prompt, without a cache as its input, besides the one for further tokens."""

    def check(self) -> None:
        """Refuse forms that do not go together.

        Raises:
            UsageError: They do not.
        """
        if self.static_cache is not None and self.static_cache < 1:
            raise UsageError(f"a static cache has at least one position, not {self.static_cache}")
        if self.static_cache is not None and self.separate_prefill:
            raise UsageError("one graph fills a static cache from prompts and tokens: leave out --separate-prefill")


def generation_forms(
    model: nn.Module,
    form: DecoderForm = DecoderForm(),
    given: Mapping[str, Any] | None = None,
    weights: Weights | None = None,
) -> Iterator[list[ModelPart]]:
    """The parts that ``model.generate`` runs, in the forms that they may have, the best first.

    Example inputs have dynamic axes that differ in size.

    Args:
        given: What belongs to the image or the sound of one prompt, where it cannot be made or has another size:
            ``image_grid_thw``, ``[1, 3]``; for a model with an encoder what this takes.
        weights: The places of the weights of a model that was built without them, to compare it with its parts.

    Raises:
        CaptureError: ``generate`` fails, or no loop over its tokens computes what it does.
        InputsError: The model cannot generate, or takes no such inputs.
    """
    name = type(model).__name__
    if not can_generate(model):
        raise InputsError(f"{name} cannot generate: use --parts whole, or name a class that can")
    if model.config.is_encoder_decoder:
        if form.static_cache is not None:
            raise InputsError(f"{name} has an encoder: leave out --static-cache, which decoders have")
        yield _encoder_decoder_parts(model, given)
        return
    example = example_of(model, given)
    modality, reason = modality_of(model, example, weights)
    if modality is not None:
        yield _multimodal_parts(model, modality, form)
    if example.beside and form == DecoderForm():
        try:
            with with_weights(model, weights):
                yield from _stateful(model, example)
        except CaptureError as error:
            reason = reason or error.reason
    if given:
        raise InputsError(f"{reason or f'{name} makes its own inputs'}: leave out --inputs ({', '.join(given)})")
    notes = _text_only(model, reason if example.beside else "")
    if form != DecoderForm():
        yield _plain_parts(model, form, notes)
        return
    with with_weights(model, weights):
        try:
            state = find_state(model, Example(token_inputs(model)))
        except CaptureError:
            state = None  # what splits it otherwise says why it cannot
    if state is None or state.is_keys_and_values:
        yield _plain_parts(model, form, notes)
    if state is not None:
        with with_weights(model, weights):
            others = stateful_parts(model, state, notes)
        yield from others


def _stateful(model: nn.Module, example: Example) -> list[list[ModelPart]]:
    """A part for prompts with images or sound, which runs the whole model, and one for tokens."""
    state = find_state(model, example)
    return [] if state is None else stateful_parts(model, state)


def _text_only(model: nn.Module, reason: str) -> tuple[str, ...]:
    """What is told of a package that takes less than its model."""
    others = " and ".join(PLURALS.get(one, one) for one in others_than_text(model))
    if not reason and not others:
        return ()
    made = f"{type(model).__name__} also takes {others}, of which no example can be made: give one with --inputs"
    return (f"takes text only: {reason or made}",)


def _plain_parts(model: nn.Module, form: DecoderForm, notes: tuple[str, ...]) -> list[ModelPart]:
    """The decoder of a model of text, or of one whose images the package does not take."""
    step = _step_of(model)
    return _decoder_parts(model, step, (*_told_of_windows(step), *notes), form)


def _step_of(model: nn.Module) -> dict[str, Any]:
    """The arguments of a step of several tokens, after some others."""
    inputs = _captured(model, token_inputs(model))["decode"]
    inputs["input_ids"] = some_tokens(model, inputs["input_ids"].shape)
    return inputs


def _told_of_windows(step: Mapping[str, Any]) -> tuple[str, ...]:
    layers = getattr(step.get("past_key_values"), "layers", ())
    windows = [int(window) for layer in layers if (window := getattr(layer, "sliding_window", None))]
    if not windows:
        return ()
    return (
        f"the cache of {len(windows)} layers with a window of {min(windows)} grows with the text: "
        f"the mask applies the window",
    )


def _decoder_parts(
    model: nn.Module, step: Mapping[str, Any], notes: tuple[str, ...], form: DecoderForm
) -> list[ModelPart]:
    """The decoder as one graph or as two, from the arguments of a step."""
    step = _with_growing_cache(step)
    if form.static_cache is not None:
        from modelexport.packages.fixed_caches import FixedCacheStep, fixed_cache_inputs

        fixed = fixed_cache_inputs(model, step, form.static_cache)
        part = with_forward(model, partial(FixedCacheStep, length=form.static_cache))
        return [ModelPart("decode", part, fixed, notes=notes, row=_first_row(fixed))]
    decode = ModelPart("decode", copy.copy(model), step, notes=notes, row=_first_row(step))
    if not form.separate_prefill:
        return [decode]
    query = count_tokens(step)
    prompt = {name: value for name, value in step.items() if name != "past_key_values"}
    if prompt.get("attention_mask") is not None:
        prompt["attention_mask"] = prompt["attention_mask"][:, :query]
    if prompt.get("position_ids") is not None:
        prompt["position_ids"] = torch.arange(query).expand_as(prompt["position_ids"]).clone()
    return [ModelPart("prefill", with_forward(model, _Prompt), prompt), decode]


def _multimodal_parts(model: nn.Module, modality: Modality, form: DecoderForm) -> list[ModelPart]:
    """The encoder of images or sound, the embedding of tokens and features, and the decoder of embeddings."""
    step = _step_of(model)
    notes = _told_of_windows(step)
    encode, merge = (with_forward(model, partial(kind, modality=modality)) for kind in (Encode, Merge))
    ids, places = modality.example["input_ids"], modality.positions
    with untouched(model, runs=False), collected():
        features = encode.forward(**modality.tensors)
        embeds = merge.forward(input_ids=ids, **features)[EMBEDS]
    tokens = step["input_ids"].shape[1]
    further = {name: value for name, value in step.items() if name != "input_ids"} | {EMBEDS: embeds[:, :tokens]}
    if not modality.compared:
        notes += (
            f"the merge of {modality.kind} features was not compared with the model's own, because the weights are "
            f"not in memory: verify FOLDER/ --model compares it",
        )
    placing = []
    if places is not None:
        further["position_ids"] = step["position_ids"][-len(places.offsets) :]
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        placing = [ModelPart(POSITIONS, with_forward(model, partial(Place, positions=places)), prompt)]
    return [
        _encoding_part(modality, encode),
        ModelPart(EMBEDDING, merge, {"input_ids": ids, **features}),
        *placing,
        *_decoder_parts(model, further, notes, form),
    ]


def _encoding_part(modality: Modality, encode: nn.Module) -> ModelPart:
    """The encoder of any number of images, or of one, if a capture keeps its size."""
    if not modality.sizes:
        return ModelPart(modality.part, encode, modality.tensors)
    kept = ", ".join(f"{name} is {modality.of_one[name][0].tolist()}" for name in modality.sizes)
    notes = (f"takes one image at a time, all of one size: {kept}; --inputs gives another",)
    return ModelPart(modality.part, encode, modality.of_one, notes=notes, constants=modality.sizes)


def _first_row(inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The inputs of the last row, which is not padded, alone; ``None`` if a cache is not keys and values alone."""
    from transformers import DynamicCache

    row = {
        name: value[-1:] if isinstance(value, torch.Tensor) and name != CACHE_POSITION else value
        for name, value in inputs.items()
    }
    past = inputs.get("past_key_values")
    if past is None:
        return row
    layers = [(layer.keys[-1:], layer.values[-1:]) for layer in keys_and_values(past)]
    return row | {"past_key_values": DynamicCache(layers)} if layers else None


def _captured(model: nn.Module, inputs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The arguments of ``forward`` in a prefill and in a following step of several tokens."""
    from transformers.exporters.utils import decompose_prefill_decode

    def fails(error: Exception) -> CaptureError:
        reason = error_line(error.__cause__ or error)
        told = f"transformers cannot split {type(model).__name__}.generate: {reason}"
        return CaptureError(f"{told}; export one forward pass with --parts whole", reason=reason)

    with untouched(model), collected(), raised_as(fails):
        eos = {"eos_token_id": model.generation_config.eos_token_id}
        found = decompose_prefill_decode(model, inputs, greedy_config(model, **eos), multi_token_decode=True)
    return {name: dict(arguments) for name, (_, arguments) in found.items()}


def _with_growing_cache(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with a cache whose layers hold only keys and values, for as many positions as the mask has.

    A layer that limits its keys to a window counts tokens in Python, and a capture would make the count a constant.
    Layers with another kind of state are not changed.
    """
    from transformers import DynamicCache

    layers, mask = keys_and_values(inputs.get("past_key_values")), inputs.get("attention_mask")
    if not layers or mask is None or mask.dim() != 2:
        return dict(inputs)
    length, generator = mask.shape[1] - count_tokens(inputs), torch.Generator().manual_seed(0)
    return {**inputs, "past_key_values": DynamicCache([_drawn(layer, length, generator) for layer in layers])}


def _drawn(layer: Any, length: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Random keys and values of a length. A model without its weights makes zeros, which tell a check nothing."""
    return tuple(
        torch.randn((*one.shape[:2], length, *one.shape[3:]), generator=generator).to(one.device, one.dtype)
        for one in (layer.keys, layer.values)
    )


def _encoder_decoder_parts(model: nn.Module, given: Mapping[str, Any] | None) -> list[ModelPart]:
    """The encoder with the keys and values of its states, and the decoder, whose cache has them from the beginning."""
    inputs = encoder_inputs(model, given)
    step = record_calls(model, inputs, 2)[1].arguments
    cache = step.get("past_key_values")
    layers = [keys_and_values(getattr(cache, f"{side}_attention_cache", None)) for side in ("self", "cross")]
    states = getattr(step.get("encoder_outputs"), "last_hidden_state", None)
    if states is None or not all(layers):
        raise CaptureError(
            f"{type(model).__name__} does not cache its encoder's keys and values separately: use --parts whole"
        )
    tokens = some_tokens(model, torch.Size((len(step["decoder_input_ids"]), STEP)))
    mask = {"attention_mask": step["attention_mask"]} if step.get("attention_mask") is not None else {}
    further = {"decoder_input_ids": tokens, "past_key_values": _both_caches(*layers), **mask}
    return [
        ModelPart("encoder", with_forward(model, _Encoder), inputs),
        ModelPart("decode", with_forward(model, partial(_Decoder, encoded=step["encoder_outputs"])), further),
    ]


STEP = 2
"""Tokens of the example step: a capture would treat an axis of size one as fixed."""


def _both_caches(own: Any, cross: Any) -> Any:
    """A cache of three decoder tokens and of the encoder's tokens."""
    from transformers import DynamicCache, EncoderDecoderCache

    generator = torch.Generator().manual_seed(0)
    decoded = DynamicCache([_drawn(layer, STEP + 1, generator) for layer in own])
    encoded = DynamicCache([_drawn(layer, layer.keys.shape[2], generator) for layer in cross])
    return EncoderDecoderCache(decoded, encoded)


class _Forward:
    """A ``forward`` that runs a part of a model."""

    def __init__(self, part: nn.Module) -> None:
        self._model, self._whole = part, type(part).forward


class _Encoder(_Forward):
    """The encoder's states, and the keys and values that the attentions of a decoder compute from them alone."""

    def __call__(self, **inputs: Any) -> dict[str, Any]:
        encoded = self._model.get_encoder()(**inputs)
        states = encoded.last_hidden_state
        # Which token it is does not matter: only what does not depend on tokens is returned, and captured.
        token = states.new_zeros(states.shape[0], 1, dtype=torch.long)
        made = self._whole(self._model, decoder_input_ids=token, encoder_outputs=encoded, use_cache=True)
        return {"encoder_hidden_states": states, **_cache_of(made, "encoder", "cross_attention_cache")}


class _Prompt(_Forward):
    def __call__(self, **inputs: Any) -> dict[str, Any]:
        from transformers import DynamicCache

        # A cache that the model makes itself may cut its keys to a window.
        inputs |= {"past_key_values": DynamicCache(), "use_cache": True}
        return _results(self._whole(self._model, **inputs))


class _Decoder(_Forward):
    def __init__(self, part: nn.Module, encoded: Any) -> None:
        super().__init__(part)
        self._kind, self._width = type(encoded), encoded.last_hidden_state.shape[-1]

    def __call__(self, **inputs: Any) -> dict[str, Any]:
        past_key_values = inputs.pop("past_key_values")
        keys = past_key_values.cross_attention_cache.layers[0].keys
        # Only its sizes are read: the keys and values that the decoder attends to are in the cache.
        states = self._kind(last_hidden_state=keys.new_zeros(keys.shape[0], keys.shape[2], self._width))
        made = self._whole(
            self._model, encoder_outputs=states, past_key_values=past_key_values, use_cache=True, **inputs
        )
        # The encoder's keys and values are the ones that were given.
        return {"logits": made.logits, **_cache_of(made, "decoder", "self_attention_cache")}


def _cache_of(made: Any, name: str, cache: str) -> dict[str, Any]:
    """One of the two caches of an encoder-decoder, a layer's keys and values together."""
    layers = getattr(made.past_key_values, cache).layers
    return {"present": {str(index): {name: {"key": one.keys, "value": one.values}} for index, one in enumerate(layers)}}


def _results(made: Any) -> dict[str, Any]:
    return {"logits": made.logits, "past_key_values": made.past_key_values}

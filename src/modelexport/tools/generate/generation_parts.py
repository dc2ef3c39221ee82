"""The forward passes that ``generate`` runs, recorded and turned into parts that an exporter can capture.

A part is the whole model with another ``forward``, so that every module keeps its path in the model.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from modelexport.core.replaced_attributes import attribute_set
from modelexport.errors import CaptureError, InputsError
from modelexport.exporting.options import PackageOptions
from modelexport.packages.generation_loop import CACHE_POSITION, PAST, PATCHES
from modelexport.packages.model_parts import ModelPart, with_forward, with_weights
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.pretrained import PretrainedModel, is_pretrained
from modelexport.tools.generate import multimodal, prompts
from modelexport.tools.generate.observed_state import (
    cache_argument,
    count_tokens,
    find_state,
    keys_and_values,
    record_calls,
)
from modelexport.tools.generate.other_state_parts import other_state_parts
from modelexport.weights.bytes_of_entries import Weights

_AS_IT_IS = PackageOptions()
STEP = 2
"""Tokens of the example step: a capture would treat an axis of size one as fixed."""


def can_generate(model: PretrainedModel) -> bool:
    """Whether a transformers model has a working ``generate``."""
    return is_pretrained(model) and bool(model.can_generate())


def generation_forms(
    model: PretrainedModel,
    asked: PackageOptions = _AS_IT_IS,
    user_inputs: Mapping[str, Any] | None = None,
    weights: Weights | None = None,
    directory: Path | None = None,
) -> Iterator[list[ModelPart]]:
    """The parts that ``model.generate`` runs, in the forms that they may have, the best first.

    Example inputs have dynamic axes that differ in size.

    Args:
        asked: Whether the cache of a decoder has a fixed number of positions, and whether prompts have a graph of their
            own, without a cache as its input.
        user_inputs: What belongs to the image or the sound of one prompt, where it cannot be made or has another size:
            ``image_grid_thw``, ``[1, 3]``; for a model with an encoder what this takes.
        weights: The places of the weights of a model that was built without them, to compare it with its parts.
        directory: The model's folder. Its processor, if there is one, gives a mask of pixels to a model that takes it.
    """
    name = type(model).__name__
    if not can_generate(model):
        raise InputsError(f"{name} cannot generate: use --parts whole, or name a class that can")
    if model.config.is_encoder_decoder:
        if asked.static_cache is not None:
            raise InputsError(f"{name} has an encoder: leave out --static-cache, which decoders have")
        yield from _encoder_decoder_forms(model, user_inputs, weights)
        return
    special = asked.static_cache is not None or asked.separate_prefill
    with with_weights(model, weights):
        example = prompts.example_of(model, user_inputs, masks_pixels=prompts.has_processor(directory))
    if (module := _generating_module(model, example.inputs)) is not None:
        problem = f"{name} has a generate of its own, and its module {module} generates"
        raise CaptureError(f"{problem}, which a package does not support: use --parts whole", reason=problem)
    modality, reason = None, ""
    try:
        modality = multimodal.find_modality(model, example, weights)
    except CaptureError as error:
        reason = error.reason
    if modality is not None:
        yield from _forms_with_images(model, modality, asked)
    if example.beside and not special:
        try:
            with with_weights(model, weights):
                # One part runs the whole model for prompts with images or sound, and one runs tokens.
                state = find_state(model, example)
                yield from other_state_parts(model, state) if state is not None else []
        except CaptureError as error:
            reason = reason or error.reason
    if user_inputs:
        raise InputsError(f"{reason or f'{name} makes its own inputs'}: leave out --inputs ({', '.join(user_inputs)})")
    others = " and ".join(multimodal.PLURALS.get(kind, kind) for kind in prompts.others_than_text(model))
    reason = reason if example.beside else ""
    no_example = f"{name} also takes {others}, of which no example can be made: give one with --inputs"
    notes = (f"takes text only: {reason or no_example}",) if reason or others else ()
    state = None
    if not special:
        with with_weights(model, weights), suppress(CaptureError):  # what splits it otherwise says why it cannot
            state = find_state(model, prompts.Example(prompts.token_inputs(model)))
    if state is None or state.is_keys_and_values:
        yield _decoder_parts(model, _step_of(model), notes, asked)
    if state is not None:
        with with_weights(model, weights):
            others_forms = other_state_parts(model, state, notes)
        yield from others_forms


def _step_of(model: PretrainedModel) -> dict[str, Any]:
    """The arguments of a step of several tokens, after some others."""
    first, last = (dict(call.arguments) for call in record_calls(model, prompts.token_inputs(model))[1:])
    if count_tokens(first) > 1:  # without a cache, a step has all tokens
        first = last
    else:
        first["input_ids"] = torch.cat([first["input_ids"], last["input_ids"]], 1)
        for name, axis in (("position_ids", -1), (CACHE_POSITION, 0)):
            if first.get(name) is not None:
                first[name] = torch.cat([first[name], last[name]], axis)
        if first.get("attention_mask") is not None:
            first["attention_mask"] = last["attention_mask"]
    first.pop("logits_to_keep", None)
    return {**first, "input_ids": prompts.some_tokens(model, first["input_ids"].shape)}


def _decoder_parts(
    model: PretrainedModel,
    step: Mapping[str, Any],
    notes: tuple[str, ...],
    asked: PackageOptions,
    run: Callable[..., Any] | None = None,
) -> list[ModelPart]:
    """The decoder as one graph or as two, from the arguments of a step.

    Args:
        run: Its ``forward``, if it is not the model's.
    """
    argument = cache_argument(model)
    layers = getattr(step.get(argument), "layers", ())
    if windows := [int(window) for layer in layers if (window := getattr(layer, "sliding_window", None))]:
        caches = f"the cache of {len(windows)} layers with a window of {min(windows)} grows with the text"
        notes = (f"{caches}: the mask applies the window", *notes)
    step = _with_growing_cache(step, argument)
    if asked.static_cache is not None:
        from modelexport.tools.generate.fixed_caches import fixed_cache_inputs, fixed_cache_step

        fixed = fixed_cache_inputs(model, step, asked.static_cache)
        part = with_forward(model, partial(fixed_cache_step, asked.static_cache))
        return [ModelPart("decode", part, fixed, notes=notes, row=_first_row(fixed, argument))]
    decoder = copy.copy(model) if run is None else with_forward(model, run)
    decode = ModelPart("decode", decoder, step, notes=notes, row=_first_row(step, argument))
    if not asked.separate_prefill:
        return [decode]
    query = count_tokens(step)
    prompt = {name: value for name, value in step.items() if name != argument}
    if prompt.get("attention_mask") is not None:
        prompt["attention_mask"] = prompt["attention_mask"][:, :query]
    if prompt.get("position_ids") is not None:
        prompt["position_ids"] = torch.arange(query).expand_as(prompt["position_ids"]).clone()
    return [ModelPart("prefill", with_forward(model, _run_prompt), prompt), decode]


def _forms_with_images(
    model: PretrainedModel, modality: multimodal.Modality, asked: PackageOptions
) -> Iterator[list[ModelPart]]:
    """The parts for images of any size, then for those of one, or the parts for other images or sound."""
    if modality.layers is not None and (asked.static_cache is not None or asked.separate_prefill):
        problem = f"layers of the decoder of {type(model).__name__} take features of images"
        raise InputsError(f"{problem}: leave out --static-cache and --separate-prefill")
    of_any_size = multimodal.with_any_size(model, modality)
    yield from (_multimodal_parts(model, each, asked) for each in (of_any_size, modality) if each is not None)


def _multimodal_parts(model: PretrainedModel, modality: multimodal.Modality, asked: PackageOptions) -> list[ModelPart]:
    """The encoder of images or sound, the embedding of tokens and features, and the decoder of embeddings."""
    step = _step_of(model)
    encoding, merging = (with_forward(model, partial(run, modality)) for run in (multimodal.encode, multimodal.merge))
    ids, places = modality.example["input_ids"], modality.positions
    with untouched(model, runs=False):
        features = encoding.forward(**modality.tensors)
        embeds = merging.forward(input_ids=ids, **features)
    tokens = step["input_ids"].shape[1]
    further = {name: value for name, value in step.items() if name != "input_ids"}
    further |= {name: value[:, :tokens] for name, value in embeds.items()}
    # It encodes any number of images, or one, if a capture keeps its size.
    encoder = ModelPart(modality.part, encoding, modality.tensors)
    if modality.of_any_size:
        axes = {(name, 0): "images" if name in modality.sizes else PATCHES for name in modality.tensors}
        encoder = replace(encoder, axes=axes)
    elif modality.sizes:
        kept = ", ".join(f"{name} is {modality.of_one[name][0].tolist()}" for name in modality.sizes)
        note = f"takes one image at a time, all of one size: {kept}; --inputs gives another"
        encoder = replace(encoder, inputs=modality.of_one, notes=(note,), constants=modality.sizes)
    if prompts.PIXEL_MASK in inspect.signature(model.forward).parameters and prompts.PIXEL_MASK not in modality.tensors:
        note = f"takes no {prompts.PIXEL_MASK}, because the model's folder has no processor: images are not padded"
        encoder = replace(encoder, notes=(*encoder.notes, note))
    parts = [encoder, ModelPart(multimodal.EMBEDDING, merging, {"input_ids": ids, **features})]
    if places is not None:
        further["position_ids"] = step["position_ids"][-places.axes :]
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if modality.of_any_size:
            prompt |= {name: modality.tensors[name] for name in modality.sizes}
        parts.append(ModelPart(multimodal.POSITIONS, with_forward(model, places), prompt))
    note = (
        f"the merge of {modality.kind} features was not compared with the model's own, because the weights are not in "
        "memory: verify FOLDER/ --model compares it"
    )
    run = None if modality.layers is None else partial(multimodal.decode, modality)
    return [*parts, *_decoder_parts(model, further, () if modality.compared else (note,), asked, run)]


def _first_row(inputs: Mapping[str, Any], argument: str) -> dict[str, Any] | None:
    """The inputs of the last row, which is not padded, alone; ``None`` if a cache is not keys and values alone.

    Args:
        argument: The name of the cache.
    """
    from transformers import DynamicCache

    row = {
        name: value[-1:] if isinstance(value, torch.Tensor) and name != CACHE_POSITION else value
        for name, value in inputs.items()
    }
    past = inputs.get(argument)
    if past is None:
        return row
    layers = [(layer.keys[-1:], layer.values[-1:]) for layer in keys_and_values(past)]
    return row | {argument: DynamicCache(layers)} if layers else None


def _with_growing_cache(inputs: Mapping[str, Any], argument: str) -> dict[str, Any]:
    """The arguments with a cache whose layers hold only keys and values, for as many positions as the mask has.

    A layer that limits its keys to a window counts tokens in Python, and a capture would make the count a constant.
    Layers with another kind of state are not changed.

    Args:
        argument: The name of the cache.
    """
    from transformers import DynamicCache

    layers, mask = keys_and_values(inputs.get(argument)), inputs.get("attention_mask")
    if not layers or mask is None or mask.dim() != 2:
        return dict(inputs)
    length, generator = mask.shape[1] - count_tokens(inputs), torch.Generator().manual_seed(0)
    return {**inputs, argument: DynamicCache([_drawn(layer, length, generator) for layer in layers])}


def _drawn(layer: Any, length: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Random keys and values of a length. A model without its weights makes zeros, which tell a check nothing."""
    return tuple(
        torch.randn((*tensor.shape[:2], length, *tensor.shape[3:]), generator=generator).to(tensor.device, tensor.dtype)
        for tensor in (layer.keys, layer.values)
    )


def _encoder_decoder_forms(
    model: PretrainedModel, user_inputs: Mapping[str, Any] | None, weights: Weights | None
) -> Iterator[list[ModelPart]]:
    """The parts of a model with an encoder: if a mask can mark the padding of a sound, with it, then without it."""
    with with_weights(model, weights):
        inputs = prompts.encoder_inputs(model, user_inputs)
    encoder, decode = _encoder_decoder_parts(model, inputs)
    takes_text = model.main_input_name == "input_ids"
    if takes_text and (others := prompts.others_than_text(model)):
        kinds = " and ".join(multimodal.PLURALS.get(kind, kind) for kind in others)
        encoder = replace(encoder, notes=(f"takes text only: a package gives an encoder no {kinds} beside tokens",))
    yield [encoder, decode]
    if not user_inputs and not takes_text and prompts.MASK in inputs:
        unmasked = {name: value for name, value in inputs.items() if name != prompts.MASK}
        encoder, decode = _encoder_decoder_parts(model, unmasked)
        note = f"takes no {prompts.MASK}: the sounds of a batch have to have one length, without padding"
        yield [replace(encoder, notes=(note,)), decode]


def _encoder_decoder_parts(model: PretrainedModel, inputs: dict[str, Any]) -> list[ModelPart]:
    """The encoder with the keys and values of its states, and the decoder, whose cache has them from the beginning."""
    from transformers import DynamicCache, EncoderDecoderCache

    step = record_calls(model, inputs, 2)[1].arguments
    argument = cache_argument(model)
    cache = step.get(argument)
    decoder, cross = (keys_and_values(getattr(cache, f"{side}_attention_cache", None)) for side in ("self", "cross"))
    states = getattr(step.get("encoder_outputs"), "last_hidden_state", None)
    if states is None or not decoder or not cross:
        raise CaptureError(
            f"{type(model).__name__} does not cache its encoder's keys and values separately: use --parts whole"
        )
    tokens = prompts.some_tokens(model, torch.Size((len(step["decoder_input_ids"]), STEP)))
    generator = torch.Generator().manual_seed(0)
    # A cache of three decoder tokens and of the encoder's tokens.
    decoded = DynamicCache([_drawn(layer, STEP + 1, generator) for layer in decoder])
    encoded = DynamicCache([_drawn(layer, layer.keys.shape[2], generator) for layer in cross])
    further = {"decoder_input_ids": tokens, argument: EncoderDecoderCache(decoded, encoded)}
    further |= {"attention_mask": mask} if (mask := step.get("attention_mask")) is not None else {}
    return [
        ModelPart("encoder", with_forward(model, _run_encoder), inputs),
        ModelPart("decode", with_forward(model, partial(_run_decoder, type(step["encoder_outputs"]), states)), further),
    ]


class _GenerateReachedError(Exception):
    """A module would generate now; its path is the argument."""


def _generating_module(model: PretrainedModel, inputs: Mapping[str, Any]) -> str | None:
    """The path of the module that generates in place of a model with a ``generate`` of its own."""
    from transformers import GenerationMixin

    def reached(path: str, *args: Any, **kwargs: Any) -> None:
        raise _GenerateReachedError(path)

    if type(model).generate is GenerationMixin.generate:
        return None
    with untouched(model), ExitStack() as stack:
        for path, module in model.named_modules():
            if path and isinstance(module, GenerationMixin):
                stack.enter_context(attribute_set(module, "generate", partial(reached, path)))
        try:
            model.generate(**copy.deepcopy(dict(inputs)))
        except _GenerateReachedError as error:
            return str(error)
        except Exception:  # the code of a model may raise anything; what splits it says why it cannot
            return None
    return None


def _run_prompt(model: PretrainedModel, /, **inputs: Any) -> dict[str, Any]:
    from transformers import DynamicCache

    # A cache that the model makes itself may cut its keys to a window.
    argument = cache_argument(model)
    output = type(model).forward(model, **{**inputs, argument: DynamicCache(), "use_cache": True})
    return {"logits": output.logits, PAST: output[argument]}


def _run_encoder(model: Any, /, **inputs: Any) -> dict[str, Any]:
    """The encoder's states, and the keys and values that the attentions of a decoder compute from them alone."""
    encoded = model.get_encoder()(**inputs)
    states = encoded.last_hidden_state
    # Which token it is does not matter: only what does not depend on tokens is returned, and captured.
    token = states.new_zeros(states.shape[0], 1, dtype=torch.long)
    output = type(model).forward(model, decoder_input_ids=token, encoder_outputs=encoded, use_cache=True)
    return {"encoder_hidden_states": states, **_cache_of(output[cache_argument(model)], "encoder", "cross")}


def _run_decoder(kind: type, example: torch.Tensor, model: PretrainedModel, /, **inputs: Any) -> dict[str, Any]:
    """The logits and the decoder's own keys and values: the encoder's are the ones that were given.

    Args:
        kind: The class of an encoder's results.
        example: Its states, of which only the last size is read.
    """
    argument = cache_argument(model)
    keys = inputs[argument].cross_attention_cache.layers[0].keys
    # Only its sizes are read: the keys and values that the decoder attends to are in the cache.
    states = kind(last_hidden_state=keys.new_zeros(keys.shape[0], keys.shape[2], example.shape[-1]))
    output = type(model).forward(model, encoder_outputs=states, use_cache=True, **inputs)
    return {"logits": output.logits, **_cache_of(output[argument], "decoder", "self")}


def _cache_of(caches: Any, name: str, attention: str) -> dict[str, Any]:
    """One of the two caches of an encoder-decoder, a layer's keys and values together."""
    layers = enumerate(keys_and_values(getattr(caches, f"{attention}_attention_cache")))
    return {"present": {str(index): {name: {"key": layer.keys, "value": layer.values}} for index, layer in layers}}

"""``genai_config.json``: how onnxruntime-genai runs a package, or why it cannot."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import onnx_ir as ir

from modelexport.exporting.fused_decoders import reads_cache
from modelexport.files.onnx_models import load_onnx
from modelexport.format.package_manifest import Manifest
from modelexport.tools.generate.image_sizes import PositionsOfSizes
from modelexport.tools.generate.multimodal import Positions

GENAI_CONFIG = "genai_config.json"
_BESIDE = ("attention_mask", "position_ids")
"""The inputs that onnxruntime-genai passes to a decoder besides tokens and a cache."""
_BEFORE = (("vision", "image_features", "pixel_values"), ("speech", "audio_features", "audio_embeds"))
"""The parts before an embedding, and the names of their features and of their input."""
_TYPES = {
    "decoder": "decoder",
    "decoder that begins with a new cache": "phi3",
    "encoder": "whisper",
    "vision": "phi3v",
    "vision, and positions on several axes": "qwen2_5_vl",
    "speech": "lfm2_audio",
}
"""What a package has, and the type of model that onnxruntime-genai runs in this way, whatever the model is."""
_FRAMES = 3000
"""The frames that onnxruntime-genai expects of any sound."""
_RESTART = 4096
"""The tokens after which onnxruntime-genai begins with a new cache, in one type of model only."""
_OPTIONS = {"log_id": "onnxruntime-genai", "provider_options": []}
_SEARCH = (
    "do_sample",
    "early_stopping",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beams",
    "num_return_sequences",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
)
"""The settings of ``generate`` that onnxruntime-genai has under the same names."""
_WITHOUT_EFFECT = re.compile(
    r"_.*|(bos|eos|pad|decoder_start)_token_id|transformers_version|(output|return|use|cache|is)_.*|.*(assistant|cache|"
    r"compile|lookbehind|lookup|batching|matching|chunk).*|low_memory|remove_invalid_values|speculation_type"
)
"""Settings of ``generate`` that do not change which tokens it returns, or that are no settings of the search."""


class GenaiError(Exception):
    """Why onnxruntime-genai cannot run a package."""


class _Graph(NamedTuple):
    """A part: its file, inputs and outputs."""

    file: str
    inputs: Mapping[str, ir.Value]
    outputs: Mapping[str, ir.Value]


def make_genai_config(
    model: Any, folder: Path, manifest: Manifest, positions: Positions | PositionsOfSizes | None = None
) -> tuple[dict[str, Any], list[str]]:
    """The configuration for a package whose decoder takes both prompts and single tokens, and notes on it.

    Args:
        model: The model, whose configurations have the lengths, the special tokens and the settings of ``generate``.
        positions: The positions of tokens, if they have several axes.

    Raises:
        GenaiError: onnxruntime-genai does not support the parts or the cache of the package.
    """
    graphs: dict[str, _Graph] = {}
    for part in manifest.parts:
        graph = load_onnx(folder / part.file).graph
        ports = ({value.name or "": value for value in values} for values in (graph.inputs, graph.outputs))
        graphs[part.name] = _Graph(part.file, *ports)
    config, generation = model.config, model.generation_config.to_dict()
    text, step = config.get_text_config(decoder=True), graphs.get("decode")
    if step is not None and graphs.keys() == {"decode"}:
        described: dict[str, Any] = {"decoder": _decoder(step, text, "input_ids"), "type": _TYPES["decoder"]}
    elif step is not None and graphs.keys() == {"encoder", "decode"}:
        described = _with_encoder(graphs["encoder"], step, text)
    elif step is not None and "embedding" in graphs and "prefill" not in graphs:
        described = _with_embedding(graphs, config, text, positions)
    else:
        raise GenaiError("onnxruntime-genai runs prompts and tokens with one graph: leave out --separate-prefill")
    caches = [value for name, value in step.inputs.items() if name.startswith("past_key_values.")]
    in_place = "attention_mask" in step.inputs and all(reads_cache(*use) for value in caches for use in value.uses())
    length = _first_number(text, "max_position_embeddings", "max_target_positions") or 2048
    notes, restart = [], manifest.generation.restart_after if manifest.generation is not None else 0
    if restart == _RESTART and described["type"] == _TYPES["decoder"]:
        described["type"] = _TYPES["decoder that begins with a new cache"]
    elif restart:
        length = min(length, restart)
        notes = [f"{GENAI_CONFIG} ends a text at {restart} tokens: generate then begins with a new cache"]
    search, left_out = _search(generation)
    search["max_length"] = min(length, search.get("max_length", length))
    if left_out:
        notes += [f"{GENAI_CONFIG} has no {', '.join(left_out)}: onnxruntime-genai does not support these settings"]
    neutral = {"length_penalty": 0.0, "repetition_penalty": 1.0}
    if search["num_beams"] > 1 and (others := [name for name in neutral if search.get(name, 1.0) != neutral[name]]):
        notes.append(f"onnxruntime-genai scores beams otherwise than generate: {', '.join(others)}; texts may differ")
    tokens = {**_special_tokens(text, generation), "vocab_size": int(text.vocab_size), "context_length": length}
    # Unless the cache may be a longer buffer, into which each step writes, the graph returns a longer one in each.
    search["past_present_share_buffer"] = in_place
    return {"model": {**tokens, **described}, "search": search}, notes


def settings_of_generate(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by which ``generate`` returns other tokens than the most probable ones, by their names.

    Args:
        generation: The model's generation configuration; what is ``None`` has the default of ``generate``.
    """
    from transformers import GenerationConfig

    neutral: tuple[Any, ...] = (None, False, [], 0, 1)
    return {
        name: value
        for name in GenerationConfig().to_dict()
        if not _WITHOUT_EFFECT.fullmatch(name)
        if (value := generation.get(name)) not in neutral or ("token_id" in name and value is not None)
    }


def _search(generation: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The settings of the search, and those of ``generate`` that onnxruntime-genai does not have."""
    search = {name: value for name in _SEARCH if isinstance(value := generation.get(name), bool | int | float)}
    left_out = [f"{name} = {value}" for name, value in settings_of_generate(generation).items() if name not in search]
    return {"do_sample": False, "num_beams": 1, "early_stopping": False, **search}, left_out


def _decoder(
    graph: _Graph, text: Any, tokens: str, *, self_side: str = "", cross: str | None = None, axes: int = 1
) -> dict[str, Any]:
    """The settings of a decoder that takes both prompts and single tokens.

    Args:
        tokens: The input that it takes for new tokens.
        self_side, cross: What tells the names of its cache and of the encoder's cache apart.
        axes: The number of positions of a token.
    """
    inputs = graph.inputs
    key = re.compile(rf"past_key_values\.(\d+)\.{re.escape(self_side)}key")
    layers = sorted(int(match[1]) for name in inputs if (match := key.fullmatch(name)))
    if layers != list(range(len(layers))) or not layers:
        raise GenaiError("its cache is not one key and one value for each layer")
    sides = [self_side] if cross is None else [self_side, cross]
    cache = {f"past_key_values.{layer}.{side}{kind}" for layer in layers for side in sides for kind in ("key", "value")}
    if missing := sorted(cache - inputs.keys()):
        raise GenaiError(f"its cache has no {missing[0]}")
    # An encoder's cache has no padding that a mask could mark.
    beside = {name: name for name in _BESIDE if name in inputs and not (cross and name == "attention_mask")}
    if other := sorted(inputs.keys() - cache - beside.keys() - {tokens}):
        raise GenaiError(f"onnxruntime-genai does not pass the input {other[0]} to a decoder")
    if tokens not in inputs or "logits" not in graph.outputs:
        raise GenaiError(f"it does not take {tokens} and return logits")
    if any(isinstance(size, int) for size in list(inputs[tokens].shape or ())[:2]):
        raise GenaiError("it takes a fixed batch or a fixed number of tokens")
    if (positions := inputs.get("position_ids")) is not None and len(positions.shape or ()) != 2 + (axes > 1):
        raise GenaiError("it takes positions on several axes")
    shapes: set[tuple[Any, ...]] = {
        tuple(inputs[name].shape or ())[1::2] for name in cache if len(inputs[name].shape or ()) == 4
    }
    if len(shapes) != 1 or not all(isinstance(size, int) for shape in shapes for size in shape):
        raise GenaiError(f"its layers have caches of different or of open sizes: {sorted(map(str, shapes))}")
    ((heads, width),) = shapes
    attention = heads if cross else _first_number(text, "num_attention_heads") or heads
    named = {"inputs_embeds" if tokens == "inputs_embeds" else "input_ids": tokens, **beside}
    crossing = _cache_names("cross_past", "past_key_values", cross) if cross else {}
    return {
        "session_options": _OPTIONS,
        "filename": graph.file,
        "num_hidden_layers": len(layers),
        "num_attention_heads": attention,
        "num_key_value_heads": heads,
        "head_size": width,
        "hidden_size": _first_number(text, "hidden_size") or attention * width,
        "inputs": {**named, **_cache_names("past", "past_key_values", self_side), **crossing},
        "outputs": {"logits": "logits", **_cache_names("present", "present", self_side)},
    }


def _cache_names(setting: str, prefix: str, side: str) -> dict[str, str]:
    """The settings for the names of a cache's tensors, with ``%d`` for the layer."""
    return {f"{setting}_{kind}_names": f"{prefix}.%d.{side}{kind}" for kind in ("key", "value")}


def _with_encoder(encoder: _Graph, step: _Graph, text: Any) -> dict[str, Any]:
    """The settings of a model that writes down sound."""
    (name, sound), *more = encoder.inputs.items()
    shape = list(sound.shape or ())
    if more or len(shape) != 3:
        raise GenaiError("the only encoders that onnxruntime-genai runs are those that take the spectrum of a sound")
    if shape[-1] != _FRAMES:
        raise GenaiError(
            f"onnxruntime-genai gives an encoder {_FRAMES} frames of sound, and this one takes {shape[-1]}"
        )
    decoder = _decoder(step, text, "decoder_input_ids", self_side="decoder.", cross="encoder.")
    states = "encoder_hidden_states"
    described = {
        "filename": encoder.file,
        "session_options": _OPTIONS,
        "hidden_size": list(encoder.outputs[states].shape or ())[-1],
        "num_attention_heads": decoder["num_key_value_heads"],
        "num_hidden_layers": decoder["num_hidden_layers"],
        "head_size": decoder["head_size"],
        "inputs": {"audio_features": name},
        "outputs": {states: states, **_cache_names("cross_present", "present", "encoder.")},
    }
    return {"decoder": decoder, "type": _TYPES["encoder"], "encoder": described}


def _with_embedding(
    graphs: Mapping[str, _Graph], config: Any, text: Any, positions: Positions | PositionsOfSizes | None
) -> dict[str, Any]:
    """The settings of a model of images or sound.

    onnxruntime-genai also prepares images and sound for the models that have the name of the type, which it does not do
    here.
    """
    axes = 1 if positions is None else positions.axes
    name, features, input_name = next(row for row in _BEFORE if row[0] in graphs)
    before, embedding = graphs[name], graphs["embedding"]
    settings: dict[str, Any] = {
        "decoder": _decoder(graphs["decode"], text, "inputs_embeds", axes=axes),
        "type": _TYPES[name],
        name: {
            "filename": before.file,
            "inputs": {input_name: next(iter(before.inputs))},
            "outputs": {features: features},
        },
        "embedding": {
            "filename": embedding.file,
            "inputs": {"input_ids": "input_ids", features: features},
            "outputs": {"inputs_embeds": "inputs_embeds"},
        },
    }
    if positions is None:
        return settings
    begins = getattr(config, "vision_start_token_id", None)
    merged = getattr(getattr(config, "vision_config", None), "spatial_merge_size", None)
    if not positions.as_in_genai or begins is None or merged is None:
        raise GenaiError("onnxruntime-genai counts the positions of an image's tokens in another way")
    settings[name]["spatial_merge_size"] = int(merged)
    video = getattr(config, "video_token_id", None)
    tokens = {"image_token_id": positions.token, "vision_start_token_id": int(begins)}
    settings["type"] = _TYPES["vision, and positions on several axes"]
    return {**settings, **tokens, **({} if video is None else {"video_token_id": video})}


def _special_tokens(text: Any, generation: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens that begin, end and pad a sequence, where ``generate`` has them: in its own configuration, or else in
    the model's. A token that neither defines is the end token; without an end token, no token ends a text.
    """
    names = (f"{name}_token_id" for name in ("bos", "eos", "pad"))
    values = (generation.get(name) if generation.get(name) is not None else getattr(text, name, None) for name in names)
    tokens: list[Any] = [list(value) if isinstance(value, tuple) else value for value in values]
    beginning, end, padding = tokens
    first_end = next(iter(end), 0) if isinstance(end, list) else end
    return {
        "bos_token_id": beginning if beginning is not None else first_end or 0,
        "eos_token_id": end if end is not None else [],
        "pad_token_id": padding if padding is not None and padding >= 0 else first_end or 0,
    }


def _first_number(config: Any, *names: str) -> int:
    return next((int(value) for name in names if (value := getattr(config, name, None))), 0)

"""``genai_config.json``: the configuration with which onnxruntime-genai runs a package."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from modelexport.exporting.fused_forms import reads_cache
from modelexport.files.onnx_models import load_onnx
from modelexport.format.manifest import Manifest, PartEntry
from modelexport.packages.multimodal import Positions

_TOKENS = {"input_ids": "input_ids", "decoder_input_ids": "input_ids", "inputs_embeds": "inputs_embeds"}
"""What a decoder takes for the new tokens, to its name in the configuration."""
_BESIDE = ("attention_mask", "position_ids")
"""The inputs that onnxruntime-genai passes to a decoder besides tokens and a cache."""
_AXES_OF_TOKENS = 2


class GenaiError(Exception):
    """Why onnxruntime-genai cannot run a package."""


@dataclass(frozen=True)
class Graph:
    """The inputs and outputs of a part."""

    file: str
    inputs: Mapping[str, ir.Value]
    outputs: Mapping[str, ir.Value]

    @classmethod
    def read(cls, part: PartEntry, folder: Path) -> Graph:
        """The graph of a part in a folder."""
        graph = load_onnx(folder / part.file).graph
        inputs, outputs = ({value.name or "": value for value in values} for values in (graph.inputs, graph.outputs))
        return cls(part.file, inputs, outputs)


@dataclass(frozen=True)
class CachePattern:
    """The names of a cache's tensors, with ``%d`` for the layer."""

    prefix: str
    side: str
    """``decoder.``, ``encoder.``, or empty for a decoder that has one cache."""

    @property
    def keys(self) -> str:
        """The pattern of the keys."""
        return f"{self.prefix}.%d.{self.side}key"

    @property
    def values(self) -> str:
        """The pattern of the values."""
        return f"{self.prefix}.%d.{self.side}value"


@dataclass(frozen=True)
class Decoder:
    """A graph that onnxruntime-genai can run."""

    file: str
    inputs: Mapping[str, str]
    """The names in the configuration of the inputs that are not its cache, to their own."""
    layers: int
    heads: int
    """Of keys and values."""
    width: int
    """Of a head."""
    own: str
    """The part of its cache's names that tells it from the encoder's cache."""
    cross: str | None
    """The same of the encoder's cache, if there is one."""
    in_place: bool
    """Whether the cache may be a longer buffer, into which each step writes."""


def read_decoder(graph: Graph, tokens: str, *, own: str = "", cross: str | None = None, axes: int = 1) -> Decoder:
    """A decoder that takes both prompts and single tokens.

    Args:
        tokens: The input that it takes for new tokens.
        own, cross: What tells the names of its cache and of the encoder's cache apart.
        axes: The number of positions of a token.

    Raises:
        GenaiError: onnxruntime-genai cannot run it.
    """
    inputs = graph.inputs
    layers = _layers(inputs, own)
    sides = [own] if cross is None else [own, cross]
    cache = {f"past_key_values.{layer}.{side}{kind}" for layer in layers for side in sides for kind in ("key", "value")}
    if missing := sorted(cache - inputs.keys()):
        raise GenaiError(f"its cache has no {missing[0]}")
    # An encoder's cache has no padding that a mask could mark.
    beside = {name: name for name in _BESIDE if name in inputs and not (cross and name == "attention_mask")}
    if other := sorted(inputs.keys() - cache - beside.keys() - {tokens}):
        raise GenaiError(f"onnxruntime-genai does not pass the input {other[0]} to a decoder")
    if tokens not in inputs or "logits" not in graph.outputs:
        raise GenaiError(f"it does not take {tokens} and return logits")
    if any(isinstance(size, int) for size in list(inputs[tokens].shape or ())[:_AXES_OF_TOKENS]):
        raise GenaiError("it takes a fixed batch or a fixed number of tokens")
    if (positions := inputs.get("position_ids")) is not None and len(positions.shape or ()) != 2 + (axes > 1):
        raise GenaiError("it takes positions on several axes")
    shapes = {_heads_and_width(inputs[name]) for name in cache}
    if len(shapes) != 1:
        raise GenaiError(f"its layers have caches of different sizes: {sorted(map(str, shapes))}")
    heads, width = shapes.pop()
    in_place = "attention_mask" in inputs and all(reads_cache(*use) for name in cache for use in inputs[name].uses())
    return Decoder(graph.file, {_TOKENS[tokens]: tokens, **beside}, len(layers), heads, width, own, cross, in_place)


def _layers(inputs: Mapping[str, ir.Value], own: str) -> list[int]:
    key = re.compile(rf"past_key_values\.(\d+)\.{re.escape(own)}key")
    layers = sorted(int(found[1]) for name in inputs if (found := key.fullmatch(name)))
    if layers != list(range(len(layers))) or not layers:
        raise GenaiError("its cache is not one key and one value for each layer")
    return layers


def _heads_and_width(value: ir.Value) -> tuple[int, int]:
    sizes = list(value.shape or ())
    if len(sizes) != 4 or not isinstance(sizes[1], int) or not isinstance(sizes[3], int):
        raise GenaiError(f"{value.name} does not have the axes batch, heads, positions and head size")
    return sizes[1], sizes[3]


GENAI_CONFIG = "genai_config.json"

_BEFORE = (
    ("vision", "image_features", "pixel_values", "phi3v"),
    ("speech", "audio_features", "audio_embeds", "lfm2_audio"),
)
"""The parts before an embedding, the names of their features and of their input, and a type that has them."""
_AXES_OF_SOUND = 3
_FRAMES = 3000
"""The frames that onnxruntime-genai expects of any sound."""
_OPTIONS = {"log_id": "onnxruntime-genai", "provider_options": []}


def make_genai_config(
    config: Any, folder: Path, manifest: Manifest, positions: Positions | None = None
) -> dict[str, Any]:
    """The configuration for a package whose decoder takes both prompts and single tokens.

    Args:
        config: The model's configuration, from which tokens and lengths are read.
        positions: The positions of tokens, if they have several axes.

    Raises:
        GenaiError: onnxruntime-genai does not support the parts or the cache of the package.
    """
    graphs = {part.name: Graph.read(part, folder) for part in manifest.parts}
    text = config.get_text_config(decoder=True)
    if graphs.keys() == {"decode"}:
        decoder, others = read_decoder(graphs["decode"], "input_ids"), {"type": "decoder"}
    elif graphs.keys() == {"encoder", "decode"}:
        decoder, others = _with_encoder(graphs)
    elif "embedding" in graphs and "prefill" not in graphs:
        decoder, others = _with_embedding(graphs, config, positions)
    else:
        raise GenaiError("onnxruntime-genai runs prompts and tokens with one graph: leave out --separate-prefill")
    length = _first_number(text, "max_position_embeddings", "max_target_positions") or 2048
    return {
        "model": {
            **_special_tokens(text),
            "vocab_size": int(text.vocab_size),
            "context_length": length,
            "decoder": _describe_decoder(decoder, text),
            **others,
        },
        "search": {
            "do_sample": False,
            "num_beams": 1,
            "max_length": length,
            # Otherwise the graph returns a longer cache in each step.
            "past_present_share_buffer": decoder.in_place,
        },
    }


def _with_encoder(graphs: Mapping[str, Graph]) -> tuple[Decoder, dict[str, Any]]:
    """The decoder of a model that writes down sound, and the settings of its encoder."""
    encoder = graphs["encoder"]
    (name, sound), *more = encoder.inputs.items()
    shape = list(sound.shape or ())
    if more or len(shape) != _AXES_OF_SOUND:
        raise GenaiError("the only encoders that onnxruntime-genai runs are those that take the spectrum of a sound")
    if shape[-1] != _FRAMES:
        raise GenaiError(
            f"onnxruntime-genai gives an encoder {_FRAMES} frames of sound, and this one takes {shape[-1]}"
        )
    decoder = read_decoder(graphs["decode"], "decoder_input_ids", own="decoder.", cross="encoder.")
    described = {
        "filename": encoder.file,
        "session_options": _OPTIONS,
        "hidden_size": list(encoder.outputs["encoder_hidden_states"].shape or ())[-1],
        "num_attention_heads": decoder.heads,
        "num_hidden_layers": decoder.layers,
        "head_size": decoder.width,
        "inputs": {"audio_features": name},
        "outputs": {
            "encoder_hidden_states": "encoder_hidden_states",
            "cross_present_key_names": CachePattern("present", "encoder.").keys,
            "cross_present_value_names": CachePattern("present", "encoder.").values,
        },
    }
    return decoder, {"type": "whisper", "encoder": described}


def _with_embedding(
    graphs: Mapping[str, Graph], config: Any, positions: Positions | None
) -> tuple[Decoder, dict[str, Any]]:
    """The decoder of a model of images or sound, and the settings of the parts before it.

    The type is one of those that onnxruntime-genai runs in this way, whatever the model is. It also prepares images and
    sound for the models that have this name, which it does not do here.
    """
    axes = 1 if positions is None else len(positions.offsets)
    decoder = read_decoder(graphs["decode"], "inputs_embeds", axes=axes)
    name, features, given, kind = next(one for one in _BEFORE if one[0] in graphs)
    settings: dict[str, Any] = {
        name: {
            "filename": graphs[name].file,
            "inputs": {given: next(iter(graphs[name].inputs))},
            "outputs": {features: features},
        },
        "embedding": {
            "filename": graphs["embedding"].file,
            "inputs": {"input_ids": "input_ids", features: features},
            "outputs": {"inputs_embeds": "inputs_embeds"},
        },
    }
    if positions is None:
        return decoder, {"type": kind, **settings}
    begins = getattr(config, "vision_start_token_id", None)
    merged = getattr(getattr(config, "vision_config", None), "spatial_merge_size", None)
    if not positions.as_in_genai or begins is None or merged is None:
        raise GenaiError("onnxruntime-genai counts the positions of an image's tokens in another way")
    settings[name]["spatial_merge_size"] = int(merged)
    tokens = {"image_token_id": positions.token, "vision_start_token_id": int(begins)}
    video = getattr(config, "video_token_id", None)
    return decoder, {"type": "qwen2_5_vl", **tokens, **({} if video is None else {"video_token_id": video}), **settings}


def _special_tokens(text: Any) -> dict[str, Any]:
    """The tokens that begin, end and pad a sequence; a token that the model does not define is the end token."""
    beginning, end, padding = (_token(getattr(text, f"{name}_token_id", None)) for name in ("bos", "eos", "pad"))
    first_end = end[0] if isinstance(end, list) else end
    return {
        "bos_token_id": beginning if beginning is not None else first_end or 0,
        "eos_token_id": end if end is not None else 0,
        "pad_token_id": padding if padding is not None and padding >= 0 else first_end or 0,
    }


def _describe_decoder(decoder: Decoder, text: Any) -> dict[str, Any]:
    attention = decoder.heads if decoder.cross else _first_number(text, "num_attention_heads") or decoder.heads
    past, present = CachePattern("past_key_values", decoder.own), CachePattern("present", decoder.own)
    cross = CachePattern("past_key_values", decoder.cross or "")
    crossing = {"cross_past_key_names": cross.keys, "cross_past_value_names": cross.values} if decoder.cross else {}
    return {
        "session_options": _OPTIONS,
        "filename": decoder.file,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": attention,
        "num_key_value_heads": decoder.heads,
        "head_size": decoder.width,
        "hidden_size": _first_number(text, "hidden_size") or attention * decoder.width,
        "inputs": {**decoder.inputs, "past_key_names": past.keys, "past_value_names": past.values, **crossing},
        "outputs": {
            "logits": "logits",
            "present_key_names": present.keys,
            "present_value_names": present.values,
        },
    }


def _first_number(config: Any, *names: str) -> int:
    return next((int(value) for name in names if (value := getattr(config, name, None))), 0)


def _token(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value

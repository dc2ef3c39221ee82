"""``genai_config.json``: the configuration with which onnxruntime-genai runs a package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelexport.format.packages import Manifest
from modelexport.packages.genai_graphs import CachePattern, Decoder, GenaiError, Graph, read_decoder
from modelexport.packages.image_positions import Positions

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

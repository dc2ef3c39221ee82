"""``genai_config.json``: the configuration with which onnxruntime-genai runs a package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelexport.exporting.packages.genai_graphs import CachePattern, Decoder, GenaiError, Graph, read_decoder
from modelexport.format.packages import Manifest

GENAI_CONFIG = "genai_config.json"

_ENCODERS = {"vision": "image", "speech": "audio"}
"""The parts of a model that takes more than text, to what their features are of."""
_FRAMES = 3000
"""The frames that onnxruntime-genai expects of any sound."""
_OPTIONS = {"log_id": "onnxruntime-genai", "provider_options": []}


def make_genai_config(config: Any, folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The configuration for a package whose decoder takes both prompts and single tokens.

    Args:
        config: The model's configuration, from which tokens and lengths are read.

    Raises:
        GenaiError: onnxruntime-genai does not support the parts or the cache of the package.
    """
    graphs = {part.name: Graph.read(part, folder) for part in manifest.parts}
    text = config.get_text_config(decoder=True)
    if graphs.keys() == {"decode"}:
        decoder, others = read_decoder(graphs["decode"], "input_ids"), {"type": "decoder"}
    elif graphs.keys() == {"encoder", "decode"}:
        decoder, others = _with_encoder(graphs, config)
    elif len(graphs) == 3 and "embedding" in graphs and _ENCODERS.keys() & graphs.keys():
        decoder, others = _with_embedding(graphs, config)
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


def _with_encoder(graphs: Mapping[str, Graph], config: Any) -> tuple[Decoder, dict[str, Any]]:
    """The decoder of a model that writes down sound, and the settings of its encoder."""
    decoder = read_decoder(graphs["decode"], "decoder_input_ids", own="decoder.", cross="encoder.")
    encoder = graphs["encoder"]
    (name, sound), *more = encoder.inputs.items()
    shape = list(sound.shape or ())
    if more or len(shape) != 3:
        raise GenaiError("of models with an encoder it runs those whose encoder takes sound, and nothing else")
    if shape[2] != _FRAMES:
        raise GenaiError(f"it gives an encoder {_FRAMES} frames of sound, and this one takes {shape[2]}")
    width = list(encoder.outputs["encoder_hidden_states"].shape or ())[-1]
    described = {
        "filename": encoder.file,
        "session_options": _OPTIONS,
        "hidden_size": width,
        "num_attention_heads": decoder.heads,
        "num_hidden_layers": decoder.layers,
        "head_size": decoder.width,
        "inputs": {"audio_features": name},
        "outputs": {
            "encoder_hidden_states": "encoder_hidden_states",
            "cross_present_key_names": "present.%d.encoder.key",
            "cross_present_value_names": "present.%d.encoder.value",
        },
    }
    return decoder, {"type": "whisper", "encoder": described}


def _with_embedding(graphs: Mapping[str, Graph], config: Any) -> tuple[Decoder, dict[str, Any]]:
    """The decoder of a model of images or sound, and the settings of the parts before it."""
    decoder = read_decoder(graphs["decode"], "inputs_embeds")
    name = next(iter(_ENCODERS.keys() & graphs.keys()))
    features = f"{_ENCODERS[name]}_features"
    encoder = {
        "filename": graphs[name].file,
        "inputs": {one: one for one in graphs[name].inputs},
        "outputs": {features: features},
    }
    embedding = {
        "filename": graphs["embedding"].file,
        "inputs": {"input_ids": "input_ids", features: features},
        "outputs": {"inputs_embeds": "inputs_embeds"},
    }
    return decoder, {"type": "phi3v", name: encoder, "embedding": embedding}


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

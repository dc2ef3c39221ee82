"""``genai_config.json``: the configuration with which onnxruntime-genai runs a package."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from modelexport.exporting.fused_forms import reads_cache
from modelexport.files.onnx_models import load_onnx
from modelexport.format.packages import Manifest

GENAI_CONFIG = "genai_config.json"

_KEY = re.compile(r"past_key_values\.(\d+)\.key")
_PLAIN = {"input_ids", "attention_mask", "position_ids"}
"""The inputs that onnxruntime-genai passes to a decoder besides its cache."""


_AXES_OF_TOKENS = 2


class GenaiError(Exception):
    """Why onnxruntime-genai cannot run a package."""


@dataclass(frozen=True)
class _Decoder:
    """A graph that onnxruntime-genai can run."""

    file: str
    inputs: list[str]
    """The inputs that are not its cache."""
    layers: int
    heads: int
    """Of keys and values."""
    width: int
    """Of a head."""
    in_place: bool
    """Whether the cache may be a longer buffer, into which each step writes."""


def make_genai_config(config: Any, folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The configuration for a decoder whose graph takes both prompts and single tokens.

    Args:
        config: The model's configuration, from which tokens and lengths are read.

    Raises:
        GenaiError: onnxruntime-genai does not support the parts or the cache of the package.
    """
    decoder = _read_decoder(folder, manifest)
    text = config.get_text_config()
    length = int(getattr(text, "max_position_embeddings", 0) or 0) or 2048
    return {
        "model": {
            "type": "decoder",
            **_special_tokens(text),
            "vocab_size": int(text.vocab_size),
            "context_length": length,
            "decoder": _describe_decoder(decoder, text),
        },
        "search": {
            "do_sample": False,
            "num_beams": 1,
            "max_length": length,
            # Otherwise the graph returns a longer cache in each step.
            "past_present_share_buffer": decoder.in_place,
        },
    }


def _read_decoder(folder: Path, manifest: Manifest) -> _Decoder:
    """The one graph of a package; fails if onnxruntime-genai cannot run it."""
    if len(manifest.parts) != 1:
        raise GenaiError(_why_not({part.name for part in manifest.parts}))
    part = manifest.parts[0]
    inputs = {value.name or "": value for value in load_onnx(folder / part.file).graph.inputs}
    layers = sorted(int(found[1]) for name in inputs if (found := _KEY.fullmatch(name)))
    if layers != list(range(len(layers))) or not layers:
        raise GenaiError("its cache is not one key and one value for each layer")
    cache = {f"past_key_values.{layer}.{kind}" for layer in layers for kind in ("key", "value")}
    if other := sorted(inputs.keys() - cache - _PLAIN):
        raise GenaiError(f"onnxruntime-genai does not pass the input {other[0]} to a decoder")
    if "input_ids" not in inputs or "logits" not in part.outputs:
        raise GenaiError("it does not take input_ids and return logits")
    if any(isinstance(size, int) for size in inputs["input_ids"].shape or ()):
        raise GenaiError("it takes a fixed batch or a fixed number of tokens")
    if (positions := inputs.get("position_ids")) is not None and len(positions.shape or ()) != _AXES_OF_TOKENS:
        raise GenaiError("it takes positions on several axes")
    shapes = {_heads_and_width(inputs[name]) for name in cache}
    if len(shapes) != 1:
        raise GenaiError(f"its layers have caches of different sizes: {sorted(map(str, shapes))}")
    heads, width = shapes.pop()
    in_place = "attention_mask" in inputs and all(reads_cache(*use) for name in cache for use in inputs[name].uses())
    return _Decoder(part.file, sorted(_PLAIN & inputs.keys()), len(layers), heads, width, in_place)


def _why_not(parts: set[str]) -> str:
    """Why onnxruntime-genai cannot run the graphs with these names together."""
    if "encoder" in parts:
        return (
            "its encoder-decoders take the keys and values of the encoder's output from the encoder's graph; here the "
            "first step computes them"
        )
    if "embedding" in parts:
        return "onnxruntime-genai prepares images and sound only for the families that it knows"
    return "onnxruntime-genai runs prompts and tokens with one graph: leave out --separate-prefill"


def _special_tokens(text: Any) -> dict[str, Any]:
    """The tokens that begin, end and pad a sequence; a token that the model does not define is the end token."""
    beginning, end, padding = (_token(getattr(text, f"{name}_token_id", None)) for name in ("bos", "eos", "pad"))
    first_end = end[0] if isinstance(end, list) else end
    return {
        "bos_token_id": beginning if beginning is not None else first_end or 0,
        "eos_token_id": end if end is not None else 0,
        "pad_token_id": padding if padding is not None and padding >= 0 else first_end or 0,
    }


def _describe_decoder(decoder: _Decoder, text: Any) -> dict[str, Any]:
    attention = int(getattr(text, "num_attention_heads", 0) or decoder.heads)
    return {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": decoder.file,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": attention,
        "num_key_value_heads": decoder.heads,
        "head_size": decoder.width,
        "hidden_size": int(getattr(text, "hidden_size", 0) or attention * decoder.width),
        "inputs": {name: name for name in decoder.inputs}
        | {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"},
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }


def _heads_and_width(value: ir.Value) -> tuple[int, int]:
    sizes = list(value.shape or ())
    if len(sizes) != 4 or not isinstance(sizes[1], int) or not isinstance(sizes[3], int):
        raise GenaiError(f"{value.name} does not have the axes batch, heads, positions and head size")
    return sizes[1], sizes[3]


def _token(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value

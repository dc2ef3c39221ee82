"""``genai_config.json``: the configuration with which onnxruntime-genai runs a package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnx_ir as ir

from modelexport.files.onnx_models import load_onnx
from modelexport.format.packages import Manifest

GENAI_CONFIG = "genai_config.json"

_KEY = re.compile(r"past_key_values\.(\d+)\.key")


class GenaiError(Exception):
    """Why onnxruntime-genai cannot run a package."""


def genai_config(config: Any, folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The configuration for a decoder whose graph takes both prompts and single tokens.

    Args:
        config: The model's configuration, from which tokens and lengths are read.

    Raises:
        GenaiError: onnxruntime-genai does not support the parts or the cache of the package.
    """
    if len(manifest.parts) != 1:
        raise GenaiError("onnxruntime-genai only runs decoders that are one graph")
    part = manifest.parts[0]
    inputs = {value.name or "": value for value in load_onnx(folder / part.file).graph.inputs}
    layers = sorted(int(found[1]) for name in inputs if (found := _KEY.fullmatch(name)))
    if layers != list(range(len(layers))) or not layers:
        raise GenaiError("its cache is not one key and one value for each layer")
    cache = {f"past_key_values.{layer}.{kind}" for layer in layers for kind in ("key", "value")}
    plain = {"input_ids", "attention_mask", "position_ids"}
    if other := sorted(inputs.keys() - cache - plain):
        raise GenaiError(f"onnxruntime-genai does not pass the input {other[0]} to a decoder")
    if "input_ids" not in inputs or "logits" not in part.outputs:
        raise GenaiError("it does not take input_ids and return logits")
    if any(isinstance(size, int) for size in inputs["input_ids"].shape or ()):
        raise GenaiError("it takes a fixed batch or a fixed number of tokens")
    shapes = {_sizes(inputs[name]) for name in cache}
    if len(shapes) != 1:
        raise GenaiError(f"its layers have caches of different sizes: {sorted(map(str, shapes))}")
    heads, width = shapes.pop()
    text = config.get_text_config()
    length = int(getattr(text, "max_position_embeddings", 0) or 0) or 2048
    attention = int(getattr(text, "num_attention_heads", 0) or heads)
    tokens = {name: _token(getattr(text, name, None)) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    eos = tokens["eos_token_id"]
    padding = tokens["pad_token_id"]
    first_eos = eos[0] if isinstance(eos, list) else eos
    return {
        "model": {
            "type": "decoder",
            "bos_token_id": tokens["bos_token_id"] if tokens["bos_token_id"] is not None else first_eos or 0,
            "eos_token_id": eos if eos is not None else 0,
            "pad_token_id": padding if padding is not None and padding >= 0 else first_eos or 0,
            "vocab_size": int(text.vocab_size),
            "context_length": length,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": part.file,
                "num_hidden_layers": len(layers),
                "num_attention_heads": attention,
                "num_key_value_heads": heads,
                "head_size": width,
                "hidden_size": int(getattr(text, "hidden_size", 0) or attention * width),
                "inputs": {name: name for name in sorted(plain & inputs.keys())}
                | {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"},
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "do_sample": False,
            "num_beams": 1,
            "max_length": length,
            # The graph returns a longer cache in each step; it does not write into its input.
            "past_present_share_buffer": False,
        },
    }


def _sizes(value: ir.Value) -> tuple[int, int]:
    """The number of heads and their size."""
    sizes = list(value.shape or ())
    if len(sizes) != 4 or not isinstance(sizes[1], int) or not isinstance(sizes[3], int):
        raise GenaiError(f"{value.name} does not have the axes batch, heads, positions and head size")
    return sizes[1], sizes[3]


def _token(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value

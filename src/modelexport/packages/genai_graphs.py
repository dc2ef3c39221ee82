"""What onnxruntime-genai has to know of a package's graphs, and whether it can run them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from modelexport.exporting.fused_forms import reads_cache
from modelexport.files.onnx_models import load_onnx
from modelexport.format.packages import PartEntry

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

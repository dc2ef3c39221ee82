"""The names of inputs, outputs, KV caches and axes that runtimes expect in graphs that generate."""

from __future__ import annotations

import re
from collections.abc import Iterator

import onnx_ir as ir

from modelexport.capture.exported_graph import Exported
from modelexport.exporting.requested_names import RequestedNames
from modelexport.packages.generation_loop import BATCH, CACHE_ARGUMENTS, CACHE_POSITION, PAST, PAST_SEQUENCE, SEQUENCE
from modelexport.packages.input_and_axis_names import plain_names

TOTAL = f"{PAST_SEQUENCE} + {SEQUENCE}"
ENCODER, FRAMES = "encoder_sequence", "encoder_frames"

_CACHE = re.compile(
    rf"(?:(?:input|output)\.)?(?:{'|'.join(CACHE_ARGUMENTS)})"
    r"\.(?:(self|cross)_attention_cache\.)?(?:layers\.)?(\d+)\.(\w+)"
)
_ATTENTION = {"self": "decoder.", "cross": "encoder.", None: ""}
_COUNTED = {BATCH, SEQUENCE, PAST_SEQUENCE, TOTAL}
"""The sizes that a loop over tokens reads, so that a graph without them is of no use to it."""
KINDS = {"keys": "key", "values": "value"}


def cache_name(name: str, prefix: str) -> str | None:
    """The usual name of a cache tensor: ``past_key_values.3.key`` for transformers' ``past_key_values.layers.3.keys``.

    A decoder that also attends to an encoder has two caches: ``past_key_values.3.decoder.key`` and
    ``past_key_values.3.encoder.key``. ``None`` for a tensor that is not part of a cache.
    """
    match = _CACHE.fullmatch(name)
    if match is None:
        return None
    attention, layer, kind = match.groups()
    return f"{prefix}.{layer}.{_ATTENTION[attention]}{KINDS.get(kind, kind)}"


def name_generation(exported: Exported) -> Exported:
    """Name the inputs, outputs and axes of a graph that generates, in place."""
    inputs, outputs = plain_names(exported)
    encodes = any(name.startswith(("encoder_", "decoder_")) for name in (*inputs, *outputs))
    total = TOTAL if any(_CACHE.fullmatch(name) for name in inputs) else SEQUENCE
    inputs |= {name: cache for name in inputs if (cache := cache_name(name, PAST))}
    outputs |= {name: cache for name in outputs if (cache := cache_name(name, "present"))}
    values = {value.name or "": value for value in exported.model.graph.inputs}
    axes = {(name, axis): size for name in values for axis, size in _axes(name, values[name], encodes, total)}
    symbols = {(name, axis): str((values[name].shape or ())[axis]) for name, axis in axes}
    of_states = {
        symbols[name, axis] for (name, axis), size in axes.items() if size == ENCODER and _CACHE.fullmatch(name)
    }
    # A decoder's mask of frames is longer than the states that an encoder makes of them.
    frames = {
        place for place, size in axes.items() if size == ENCODER and of_states and symbols[place] not in of_states
    }
    axes = {(inputs[name], axis): FRAMES if (name, axis) in frames else size for (name, axis), size in axes.items()}
    needed = {place: size for place, size in axes.items() if size in _COUNTED}
    suggested = {place: size for place, size in axes.items() if size not in _COUNTED}
    # The encoder's cache, which a step reads but does not change, is not an output.
    kept = [
        name
        for name in outputs.values()
        if ".encoder." not in name or name.replace("present", PAST, 1) not in inputs.values()
    ]
    escaped = [re.sub(r"([*?[])", r"[\1]", name) for name in kept]
    return RequestedNames(inputs=inputs, outputs=outputs, kept=escaped, axes=needed, suggested=suggested)(exported)


def _axes(name: str, value: ir.Value, encodes: bool, total: str) -> Iterator[tuple[int, str]]:
    """The dynamic axes of an input with their names; with ``encodes``, inputs not of the decoder are the encoder's."""
    if value.shape is None:
        return
    match = _CACHE.fullmatch(name)
    names: tuple[str, ...] = (BATCH, SEQUENCE)
    if match is not None:
        names = (BATCH, "heads", ENCODER if match[1] == "cross" else PAST_SEQUENCE, "width")
    elif name == "position_ids" and len(value.shape) > len(names):
        names = ("axes", BATCH, SEQUENCE)
    elif name == CACHE_POSITION:
        names = (SEQUENCE,)
    elif "_features" in name and len(value.shape) == len(names):
        names = (f"{name.partition('_features')[0]}_tokens",)
    elif name.endswith("_grid_thw"):
        names = ("images",)
    elif len(value.shape) > 3:
        inner = ("height", "width") if name.endswith("mask") else ("channels", "height", "width")
        names = ("images", *("tiles",) * (len(value.shape) - len(inner) - 1), *inner)
    elif encodes and not name.startswith("decoder_"):
        names = (BATCH, ENCODER)
    elif name == "attention_mask":
        names = (BATCH, total)
    for axis, (size, symbol) in enumerate(zip(value.shape, names, strict=False)):
        if not isinstance(size, int) and size.value and not size.value.isdigit():
            yield axis, symbol

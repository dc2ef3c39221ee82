"""The names that people and runtimes expect in a generating graph: those of its cache and its axes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import onnx_ir as ir

from modelexport.capture.exported import Exported
from modelexport.exporting.interface import Interface
from modelexport.graph.size_symbols import SYMBOL
from modelexport.packages.generator import CACHE_POSITION

BATCH, SEQUENCE, PAST = "batch", "sequence", "past_sequence"
TOTAL = f"{PAST} + {SEQUENCE}"
ENCODER = "encoder_sequence"

_CACHE = re.compile(
    r"(?:(?:input|output)\.)?past_key_values\.(?:(self|cross)_attention_cache\.)?(?:layers\.)?(\d+)\.(\w+)"
)
_ATTENTION = {"self": "decoder.", "cross": "encoder.", None: ""}
_KINDS = {"keys": "key", "values": "value"}


def cache_name(name: str, prefix: str) -> str | None:
    """The usual name of a cache tensor: ``past_key_values.3.key`` for transformers' ``past_key_values.layers.3.keys``.

    A decoder that also attends to an encoder has two caches: ``past_key_values.3.decoder.key`` and
    ``past_key_values.3.encoder.key``. ``None`` for a tensor that is not part of a cache.
    """
    found = _CACHE.fullmatch(name)
    if found is None:
        return None
    attention, layer, kind = found.groups()
    return f"{prefix}.{layer}.{_ATTENTION[attention]}{_KINDS.get(kind, kind)}"


def name_generation(exported: Exported) -> Exported:
    """Name the inputs, outputs and axes of a graph that generates, in place."""
    graph = exported.model.graph
    encodes = any(name.startswith(("encoder_", "decoder_")) for name in (*_names(graph.inputs), *exported.output_names))
    inputs = {value.name or "": value for value in graph.inputs}
    total = TOTAL if any(_CACHE.fullmatch(name) for name in inputs) else SEQUENCE
    new_inputs = {name: cache_name(name, "past_key_values") or name.removeprefix("input.") for name in inputs}
    new_outputs = {name: cache_name(name, "present") or name.removeprefix("output.") for name in exported.output_names}
    sizes = [
        (new_inputs[name], axis, symbol)
        for name, value in inputs.items()
        for axis, symbol in _axes(name, value, encodes, total)
    ]
    given = set(new_inputs.values())
    # The encoder's cache, which a step reads but does not change, is not an output.
    kept = [
        name
        for name in new_outputs.values()
        if ".encoder." not in name or name.replace("present", "past_key_values", 1) not in given
    ]
    return Interface(
        inputs=new_inputs,
        outputs=new_outputs,
        kept=[re.sub(r"([*?[])", r"[\1]", name) for name in kept],
        axes={(name, axis): symbol for name, axis, symbol in sizes},
    )(exported)


def name_axes(exported: Exported, *, axes: Mapping[tuple[str, int], str]) -> Exported:
    """Name the inputs, outputs and given axes of a graph that generates, in place.

    Raises:
        UsageError: An axis has a fixed size.
    """
    inputs = {name: name.removeprefix("input.") for name in _names(exported.model.graph.inputs)}
    outputs = {name: name.removeprefix("output.") for name in exported.output_names}
    known = set(inputs.values())
    return Interface(
        inputs=inputs, outputs=outputs, axes={place: size for place, size in axes.items() if place[0] in known}
    )(exported)


def name_pipeline(exported: Exported) -> Exported:
    """Name the axes of a graph of a pipeline by what they usually are, in place.

    An axis that always has the size of an earlier one has its name. A second size of one name is named after its input:
    ``encoder_hidden_states_sequence``.
    """
    names: dict[str, str] = {}
    axes: dict[tuple[str, int], str] = {}
    for value in exported.model.graph.inputs:
        for axis in _open(value):
            size = value.shape[axis] if value.shape is not None else None
            if not isinstance(size, ir.SymbolicDim) or size.value is None or not SYMBOL.fullmatch(size.value):
                continue
            usual = _usual_axes(len(value.shape or ()))[axis]
            if size.value not in names:
                names[size.value] = usual if usual not in names.values() else f"{value.name}_{usual}"
            axes[value.name or "", axis] = names[size.value]
    return Interface(axes=axes)(exported)


def _usual_axes(rank: int) -> tuple[str, ...]:
    """The names of the axes of tokens, of their states, of images and of videos."""
    if rank <= 3:
        return (BATCH, SEQUENCE, "width")[:rank]
    return (BATCH, "channels", *("frames", "depth")[: rank - 4], "height", "width")


def _open(value: ir.Value) -> list[int]:
    return [axis for axis, size in enumerate(value.shape or ()) if not isinstance(size, int)]


def _names(values: Iterable[ir.Value]) -> list[str]:
    return [value.name or "" for value in values]


def _axes(name: str, value: ir.Value, encodes: bool, total: str) -> Iterator[tuple[int, str]]:
    """The dynamic axes of an input with their names; with ``encodes``, inputs not of the decoder are the encoder's."""
    if value.shape is None:
        return
    found = _CACHE.fullmatch(name)
    names: tuple[str, ...] = (BATCH, SEQUENCE)
    if found is not None:
        names = (BATCH, "heads", ENCODER if found[1] == "cross" else PAST, "width")
    elif name == "position_ids" and len(value.shape) > len(names):
        names = ("axes", BATCH, SEQUENCE)
    elif name == CACHE_POSITION:
        names = (SEQUENCE,)
    elif name.endswith("_features"):
        names = (f"{name.removesuffix('_features')}_tokens",)
    elif len(value.shape) > 3:
        names = ("images", "channels", "height", "width")
    elif encodes and not name.startswith("decoder_"):
        names = (BATCH, ENCODER)
    elif name == "attention_mask":
        names = (BATCH, total)
    for axis, (size, symbol) in enumerate(zip(value.shape, names, strict=False)):
        if not isinstance(size, int) and size.value and not size.value.isdigit():
            yield axis, symbol

"""Which of the tensors that a model returns its file has as outputs, if some were left out at export."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from modelexport.core.json_decoding import decode_json
from modelexport.format.keys import EXPOSED, OUTPUTS


def keep_outputs(model: ir.Model, kept: Collection[int]) -> None:
    """Keep only the outputs at these positions, and record in the model that the others were left out."""
    outputs = list(model.graph.outputs)
    if len(kept) == len(outputs):
        return
    model.graph.outputs.clear()
    model.graph.outputs.extend(outputs[index] for index in sorted(kept))
    model.metadata_props[OUTPUTS] = json.dumps([index in kept for index in range(len(outputs))])


def record_exposed(model: ir.Model, count: int) -> None:
    """Record in the model that its last outputs are what inner calls return."""
    if count:
        model.metadata_props[EXPOSED] = json.dumps([value.name for value in model.graph.outputs[-count:]])


def exposed_outputs(properties: Mapping[str, str]) -> list[str]:
    """The names of the outputs that are what inner calls return.

    Raises:
        FileFormatError: The property is damaged.
    """
    return decode_json(properties.get(EXPOSED, "[]"), kind=list[str], damaged=f"the property {EXPOSED} is damaged")


def requested_outputs(properties: Mapping[str, str], returned: Sequence[Any]) -> list[Any]:
    """The part of what a model returns, one entry for each tensor, that its file has.

    Args:
        properties: The ``metadata_props`` of the file.

    Raises:
        FileFormatError: The property is damaged.
    """
    if OUTPUTS not in properties:
        return list(returned)
    flags = decode_json(properties[OUTPUTS], kind=list[bool], damaged=f"the property {OUTPUTS} is damaged")
    # Of another number of tensors nothing is known: then all of them are compared, and the difference shows.
    if len(flags) != len(returned):
        return list(returned)
    return [one for one, kept in zip(returned, flags, strict=True) if kept]

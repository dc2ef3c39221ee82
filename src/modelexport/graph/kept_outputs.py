"""Which of the tensors that a model returns its file has as outputs, if some were left out at export."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

import onnx_ir as ir

from modelexport.format.keys import EXPOSED, OUTPUTS
from modelexport.graph.properties import record

T = TypeVar("T")


def keep_outputs(model: ir.Model, kept: Collection[int]) -> None:
    """Keep only the outputs at these positions, and record in the model that the others were left out."""
    outputs = list(model.graph.outputs)
    if len(kept) == len(outputs):
        return
    model.graph.outputs.clear()
    model.graph.outputs.extend(outputs[index] for index in sorted(kept))
    record(model, OUTPUTS, [index in kept for index in range(len(outputs))])


def record_exposed(model: ir.Model, count: int) -> None:
    """Record in the model that its last outputs are what inner calls return."""
    if count:
        record(model, EXPOSED, [value.name or "" for value in model.graph.outputs[-count:]])


def exposed_outputs(model: ir.Model) -> list[str]:
    """The names of the outputs that are what inner calls return."""
    return list(model.meta.get(EXPOSED, ()))


def requested_outputs(model: ir.Model, returned: Sequence[T]) -> list[T]:
    """The part of what a PyTorch model returns, one entry for each tensor, that its file has."""
    flags: list[bool] = model.meta.get(OUTPUTS, [True] * len(returned))
    # Of another number of tensors nothing is known: then all of them are compared, and the difference shows.
    if len(flags) != len(returned):
        return list(returned)
    return [tensor for tensor, kept in zip(returned, flags, strict=True) if kept]

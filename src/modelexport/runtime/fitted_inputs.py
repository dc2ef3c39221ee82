"""Checks arrays that are given for the inputs of a model: their names, types, shapes and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.core.limits import INPUT_BYTES
from modelexport.core.text import first_few, suggest
from modelexport.errors import InputsError
from modelexport.format.keys import ADOPTED
from modelexport.graph.nodes import may_be, required_inputs, sizes_of
from modelexport.runtime.sessions import array_of_input


def fitted(feeds: Mapping[str, Any], model: ir.Model, *, optional: bool = False) -> dict[str, Any]:
    """Arrays with the types of a model's inputs.

    Args:
        optional: Arrays for inputs that have a default in the model may be given, too.
    """
    if not isinstance(feeds, Mapping):
        raise InputsError(f"{type(feeds).__name__} is not a mapping: give the array of each input by its name")
    inputs = {value.name or "": value for value in required_inputs(model)}
    if missing := [name for name in inputs if name not in feeds]:
        surplus = [name for name in feeds if name not in inputs]
        told = f", and {first_few(surplus)} is none of them" if surplus else ""
        raise InputsError(f"{first_few(missing)} missing; the model takes {first_few(inputs)}{told}")
    if optional:
        inputs = {value.name or "": value for value in model.graph.inputs}
    check_names(feeds, inputs, "the model")
    given = {name: value for name, value in inputs.items() if name in feeds}
    fitting = {name: _fitted(name, array_of_input(name, feeds[name]), value) for name, value in given.items()}
    check_named_sizes(fitting, model)
    return fitting


def _fitted(name: str, array: Any, value: ir.Value) -> Any:
    """An array in the type of an input."""
    wanted = value.dtype.numpy() if value.dtype is not None else array.dtype
    kinds = {"i": "iub", "u": "iub", "b": "bui", "f": "fiu", "O": "US"}
    if array.dtype != wanted and array.dtype.kind not in kinds.get(wanted.kind, ""):
        raise InputsError(f"{name} has {array.dtype}, and the model takes {wanted}")
    if not may_be(value.shape, ir.Shape(array.shape)):
        sizes = ", ".join(map(str, value.shape or ()))
        raise InputsError(f"{name} has the shape {list(array.shape)}, and the model takes [{sizes}]")
    if array.size * wanted.itemsize > INPUT_BYTES:
        raise InputsError(f"{name} takes more than {INPUT_BYTES:,} bytes as {wanted}: give smaller arrays, or fewer")
    if wanted.kind in "iu" and array.size and not np.can_cast(array.dtype, wanted):
        range_of_type = np.iinfo(wanted)
        for number in (int(array.min()), int(array.max())):
            if not range_of_type.min <= number <= range_of_type.max:
                raise InputsError(f"{name} has the number {number}, and the model takes {wanted}, which cannot hold it")
    with np.errstate(over="ignore"):
        converted = array.astype(wanted, order="C", copy=False)
    if wanted.kind == "f" and (lost := np.isinf(converted) & ~np.isinf(array)).any():
        raise InputsError(f"{name} has the number {array[lost][0]}, and the model takes {wanted}, which cannot hold it")
    return converted


def check_names(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuse arrays that nothing takes: their names may be wrong."""
    names = list(dict.fromkeys(known))
    if surplus := [name for name in given if name not in names]:
        raise InputsError(f"{what} has no input {surplus[0]}{suggest(surplus[0], names)}: it takes {', '.join(names)}")


def check_named_sizes(arrays: Mapping[str, Any], model: ir.Model) -> None:
    """Refuse arrays that give two sizes to one dynamic axis. In files of other exporters names may mean nothing."""
    sizes: dict[int | str | None, tuple[int, str]] = {}
    for value in required_inputs(model) if ADOPTED not in model.meta else ():
        shape = np.shape(arrays[value.name or ""])
        for axis, size in zip(sizes_of(value), shape, strict=False):
            known, other = sizes.setdefault(axis, (size, value.name or ""))
            if axis is not None and known != size:
                raise InputsError(f"{value.name} has the shape {list(shape)}, and in {other} {axis} is {known}")

"""More inputs for two files that should compute the same: other numbers, ids, masks and sizes, made without PyTorch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.graph.nodes import required_inputs
from modelexport.graph.operator_kinds import CASTS, SELECTS_ELEMENTS
from modelexport.graph.size_conditions import conditions_of, fitting, larger
from modelexport.graph.size_formulas import evaluated_size
from modelexport.runtime.shapes import symbols_of_inputs

FACTORS = (4.0, -1.0, 0.5, 2.0, 0.0, 1.0, 3.0)
"""Factors for numbers of both signs: as many as no usual size is a multiple of, and all of them exact in every type."""


def varied_inputs(
    model: ir.Model, feeds: Mapping[str, Any], fixed: Collection[str] = (), seed: int = 0
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Variations of the inputs of a file, with their descriptions. The file need not run with all of them.

    Args:
        feeds: Inputs with which the file runs.
        fixed: The symbols of dynamic axes that keep their size.
        seed: For what is drawn.
    """
    rows = rows_of_ids(model)

    def other(name: str, array: Any) -> Any:
        """Ids of all rows of the weight that they select; of anything else the same elements at other places."""
        random = np.random.default_rng((seed, *name.encode()))
        if name in rows:
            return random.integers(0, rows[name], array.shape).astype(array.dtype)
        return random.permutation(array.reshape(-1)).reshape(array.shape)

    def zeros_and_ones(name: str, array: Any) -> Any:
        """Masks that hide some places, where integers and conditions may be masks."""
        random = np.random.default_rng((seed, *name.encode()))
        may_be_mask = array.dtype.kind in "iub" and array.ndim > 1 and name not in rows
        return random.integers(0, 2, array.shape).astype(array.dtype) if may_be_mask else array

    def spread(_: str, array: Any) -> Any:
        signed = array.dtype.kind == "f" and bool((array < 0).any() and (array > 0).any())
        factors = np.resize(np.array(FACTORS, array.dtype), array.shape) if signed else None
        return array if factors is None else array * factors

    larger = _resized(model, feeds, fixed)
    changes = (("other numbers", other, feeds), ("zeros and ones", zeros_and_ones, feeds),
               ("larger and smaller numbers", spread, feeds), ("other conditions", negated, feeds),
               ("other sizes", other, larger))  # fmt: skip
    for what, change, arrays in changes[: None if larger is not feeds else -1]:
        changed = {name: change(name, array) for name, array in arrays.items()}
        if any(not np.array_equal(changed[name], array) for name, array in feeds.items()):
            yield what, changed


def negated(_: str, array: Any) -> Any:
    """A condition of one element, which may choose a branch, is the other one; anything else is as it was."""
    return np.asarray(~array) if array.dtype.kind == "b" and array.size == 1 else array


def _resized(model: ir.Model, feeds: Mapping[str, Any], fixed: Collection[str]) -> Mapping[str, Any]:
    """Inputs whose dynamic axes are longer, as far as the conditions of the file allow; the same if none can be."""
    axes = {value.name or "": [str(size) for size in value.shape or ()] for value in required_inputs(model)}
    symbols = symbols_of_inputs(model)
    before = {
        size: array.shape[axis]
        for name, array in feeds.items()
        for axis, size in enumerate(axes[name])
        if size in symbols
    }
    free = [symbol for symbol, size in before.items() if symbol not in fixed and size > 1]
    wanted = before | {symbol: larger(before[symbol]) for symbol in free}
    if (sizes := fitting(conditions_of(model), wanted, free)) in (None, before):
        return feeds
    resized = dict(feeds)
    for name, array in feeds.items():
        for axis, size in enumerate(axes[name]):
            now = evaluated_size(size, sizes)
            if now is not None and now != array.shape[axis] and array.shape[axis]:
                resized[name] = resized[name].take(np.arange(now) % array.shape[axis], axis)
    return resized


def rows_of_ids(model: ir.Model) -> dict[str, int]:
    """The inputs that select rows of a weight, to the number of rows."""
    rows_by_input: dict[str, int] = {}
    for value in model.graph.inputs:
        if value.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
            continue
        pending, seen = [value], {value}
        while pending:
            current = pending.pop()
            for node, index in current.uses():
                table = node.inputs[0] if node.op_type == "Gather" and index == 1 else None
                if table is not None and table.is_initializer() and table.const_value is not None:
                    rows = int(table.const_value.shape.numpy()[0])
                    rows_by_input[value.name or ""] = min(rows, rows_by_input.get(value.name or "", rows))
                elif node.op_type in _WITHIN and (index == 0 or node.op_type in _OF_ALL):
                    pending += [output for output in node.outputs if output not in seen]
                    seen.update(node.outputs)
    return rows_by_input


_WITHIN = SELECTS_ELEMENTS | CASTS | {"Abs", "Clip", "Max", "Min", "Mod", "Neg"}
"""Operators whose results are in the range of the integers that they get, or of rows counted from the end."""
_OF_ALL = {"Concat", "Max", "Min"}
"""Those of them that get such integers as any input; the others get indices, sizes and bounds after the first."""

"""Batches of runs, padded to the longest: methods that measure activations take one scale for all rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.graph.nodes import required_inputs
from modelexport.graph.size_conditions import broken, conditions_of
from modelexport.traces.calibration_data import RunInputs

ROWS = 8
"""The number of runs in a batch."""


def padded_batches(
    model: ir.Model, feeds: RunInputs, output: str
) -> Iterator[tuple[dict[str, Any], Callable[[Any], list[Any]]]]:
    """Inputs for several runs at once, with zeros after the shorter ones; none if the first axes do not have one name.

    Args:
        output: The name of the output that is compared.

    Returns:
        Each batch with a function that gives the rows of each run in the output, without what belongs to padding;
        none if the output does not have as many rows as the batch.
    """
    axes = {value.name or "": _symbols(value) for value in required_inputs(model)}
    declared = next(_symbols(value) for value in model.graph.outputs if value.name == output)
    first = [sizes[0] if sizes else "" for sizes in (*axes.values(), declared)]
    if len(set(first)) > 1 or first[0] in ("", "?"):
        return
    for runs in (feeds[start : start + ROWS] for start in range(0, len(feeds), ROWS)):
        sizes = [
            {symbol: size for name in axes for symbol, size in zip(axes[name], run[name].shape, strict=True) if symbol}
            for run in runs
        ]
        rows = [len(next(iter(run.values()))) for run in runs]
        of_batch = {symbol: max(size[symbol] for size in sizes) for symbol in sizes[0]} | {first[0]: sum(rows)}
        if len(runs) > 1 and not broken(conditions_of(model), of_batch):

            def rows_of_runs(
                array: Any, rows: Sequence[int] = rows, sizes: Sequence[Mapping[str, int]] = sizes
            ) -> list[Any]:
                if array.shape[:1] != (sum(rows),):
                    return []
                parts = np.split(array, np.cumsum(rows)[:-1])
                cuts = [tuple(slice(size.get(symbol)) for symbol in declared[1:]) for size in sizes]
                return [part[(slice(None), *cut)] for part, cut in zip(parts, cuts, strict=True)]

            yield {name: _joined([run[name] for run in runs]) for name in axes}, rows_of_runs


def _symbols(value: ir.Value) -> list[str]:
    """The symbol of each axis, ``?`` if it is dynamic without one; empty if it is fixed."""
    return ["" if isinstance(size, int) else size.value or "?" for size in value.shape or ()]


def _joined(arrays: Sequence[Any]) -> Any:
    """Arrays along their first axis, with zeros at the end of the other axes of those that are shorter."""
    longest = np.max([array.shape for array in arrays], axis=0)[1:]
    padding = [[(0, 0), *((0, most - size) for most, size in zip(longest, a.shape[1:], strict=True))] for a in arrays]
    return np.concatenate([np.pad(array, pad) for array, pad in zip(arrays, padding, strict=True)])

"""The outputs of two files that should compute the same, in ONNX Runtime: for some inputs, and variations of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from msgspec.structs import replace

from modelexport.errors import UsageError
from modelexport.format.dtypes import dtype_name
from modelexport.graph.nodes import all_nodes, initializers
from modelexport.runtime.sessions import arrays_in, run_session
from modelexport.traces.array_differences import Difference, compare_arrays, compare_outputs, relative_error, worst
from modelexport.traces.tolerances import ALLOWED, TIMES_OWN


@dataclass(frozen=True)
class Rounding:
    """How far off outputs may be: by the rounding of a type, and by a multiple of the change that rounding the inputs
    causes.
    """

    dtype: str
    """The narrowest floating-point type in which the second file computes."""

    def of_inputs(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs, their numbers rounded to the type; those that have it become the next one, up or down."""
        random = np.random.default_rng(0)

        def rounded(array: Any) -> Any:
            if self.dtype in ("float16", "float32") and array.dtype.itemsize > np.dtype(self.dtype).itemsize:
                return array.astype(self.dtype).astype(array.dtype)
            # Whole numbers, such as those of a mask, are what they are: nothing rounded them.
            near = np.nextafter(array, random.choice([-np.inf, np.inf], array.shape).astype(array.dtype))
            return np.where(np.trunc(array) == array, array, near)

        return {name: rounded(array) if array.dtype.kind == "f" else array for name, array in feeds.items()}


def compare_sessions(
    first: onnxruntime.InferenceSession,
    second: onnxruntime.InferenceSession,
    runs: Iterable[tuple[str, Mapping[str, Any]]],
    rounding: Rounding | None = None,
) -> tuple[list[Difference], list[str]]:
    """The largest difference of each output, and what the inputs were for which the outputs were compared.

    Args:
        runs: What inputs are, with the inputs. Of those behind the first, some are left out: what the first file does
            not run with, or has no numbers for.
        rounding: The differences that are accepted; by default the rounding of the type of each output.

    Raises:
        UsageError: A file does not run with the first inputs.
    """
    by_name: dict[str, list[Difference]] = defaultdict(list)
    tried: list[str] = []
    for what, feeds in runs:
        try:
            expected = run_session(first, feeds)
        except UsageError:
            if not tried:
                raise
            continue
        if tried and any(
            array.dtype.kind == "f" and not np.isfinite(array).all() for array in arrays_in(expected).values()
        ):
            continue
        try:
            actual = run_session(second, feeds)
        except UsageError as error:
            if not tried:
                raise
            outputs = [Difference(name=name, status="differ", reason=str(error)) for name in arrays_in(expected)]
        else:
            outputs = _compared(expected, actual)
            if rounding is not None and any(output.status == "differ" for output in outputs):
                noisy = run_session(first, rounding.of_inputs(feeds))
                outputs = _judged_again(outputs, expected, noisy, actual, ALLOWED[rounding.dtype])
        if any(output.status == "differ" for output in outputs):
            outputs = without_random(outputs, expected, run_session(first, feeds))
        for output in outputs:
            reason = f"with {what}: {output.reason}" if output.reason and tried else output.reason
            by_name[output.name].append(replace(output, reason=reason))
        tried.append(what)
    compared = ([each for each in found if each.status != "not compared"] or found for found in by_name.values())
    return [largest for found in compared if (largest := worst(found))], tried


def without_random(
    outputs: Sequence[Difference], expected: Mapping[str, Any], again: Mapping[str, Any]
) -> list[Difference]:
    """The differences, of which those of random outputs are not compared.

    Args:
        outputs: By position, the differences from ``expected``.
        again: Another run of the file that gave ``expected``, on the same inputs: what differs in it is random.
    """
    itself = _compared(expected, again)
    random = [place for place, output in enumerate(itself) if output.status == "differ"]
    return [
        replace(output, status="not compared", reason=RANDOM) if place in random else output
        for place, output in enumerate(outputs)
    ]


RANDOM = "it depends on random numbers"


def _judged_again(
    outputs: list[Difference],
    expected: Mapping[str, Any],
    noisy: Mapping[str, Any],
    actual: Mapping[str, Any],
    least: float,
) -> list[Difference]:
    """The differences, judged by what the first file computes of rounded inputs (``noisy``)."""
    arrays = [list(arrays_in(results).values()) for results in (expected, noisy, actual)]
    if {len(outputs)} != {*map(len, arrays)}:
        return outputs
    judged = []
    for output, right, other, result in zip(outputs, *arrays, strict=True):
        allowed = max(least, TIMES_OWN * relative_error(right, other))
        again = compare_arrays(output.name, right, result, allowed=allowed)
        if again.relative is not None and again.relative > least and allowed >= 1:
            again = replace(again, status="not compared", reason="inputs that differ by rounding change it as much")
        judged.append(again)
    return judged


def _compared(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> list[Difference]:
    """The outputs of two runs, by position."""
    ours, theirs = arrays_in(expected), arrays_in(actual)
    names = [name if name == other else f"{name} / {other}" for name, other in zip(ours, theirs, strict=False)]
    return compare_outputs([*names, *list(theirs)[len(names) :]], list(ours.values()), list(theirs.values()))


def narrowest_type(model: ir.Model) -> str:
    """The narrowest floating-point type of the values and weights of a file, of those with a known rounding."""
    values = [*initializers(model), *(value for node in all_nodes(model) for value in node.outputs)]
    types = {dtype_name(value.dtype) for value in values if value.dtype is not None}
    return max(types & ALLOWED.keys(), key=ALLOWED.__getitem__, default="float32")

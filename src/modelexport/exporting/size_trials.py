"""Runs of a model and its file with other sizes of the example inputs, by which conditions of sizes are judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from modelexport.core.collected_messages import collected
from modelexport.exporting.fixed_axes import Tried, tried

if TYPE_CHECKING:
    from modelexport.pytorch.nested_tensors import Inputs
    from modelexport.verify.model_and_file import ModelAndFile


class SizeTrials:
    """Runs of a model and its file with other sizes of the example inputs, each made once."""

    def __init__(self, pair: ModelAndFile, inputs: Inputs) -> None:
        self._pair, self._inputs = pair, inputs
        self._done: dict[tuple[tuple[str, int], ...], Tried | None] = {}

    def run(self, sizes: Mapping[str, int]) -> Tried | None:
        """What happens with sizes of the dynamic axes; ``None`` if the inputs would be too large, or crash PyTorch."""
        key = tuple(sorted(sizes.items()))
        if key not in self._done:
            self._done[key] = self._run(sizes)
        return self._done[key]

    def _run(self, sizes: Mapping[str, int]) -> Tried | None:
        from modelexport.pytorch.inputs.other_sizes import (
            LARGEST_TRIED,
            symbol_sizes,
            too_large,
            with_sizes,
            with_telling_numbers,
            without_parts,
        )

        model = self._pair.tagged.model
        before = symbol_sizes(self._inputs, model)
        if any(size > max(LARGEST_TRIED, 2 * before[symbol] + 1) for symbol, size in sizes.items()):
            return None
        if too_large(self._inputs, model, sizes):
            return None
        other = with_sizes(self._inputs, model, sizes)
        if without_parts(self._inputs, other):
            return None
        result = self._compared(other)
        if result.status == "agree" and (telling := with_telling_numbers(other)) is not None:
            result_of_others = self._compared(telling)
            return result_of_others if result_of_others.status == "differ" else result
        return result

    def _compared(self, inputs: Inputs) -> Tried:
        from modelexport.pytorch.runs.outputs_as_users_run import returned_by

        pair = self._pair
        with collected():
            try:
                returned_by(pair.model, inputs)  # most sizes that are refused are refused here, in no time
                right = pair.returned(inputs)
                if not pair.agrees(inputs, right):
                    return tried(pair.compared(inputs, {})[1])
                fault = pair.fault_beside_nan(inputs, right)
                return Tried("differ" if fault else "agree", fault)
            except Exception:  # a model may raise anything for sizes that it does not accept, some only in float64
                return Tried("not compared")

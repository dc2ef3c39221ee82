"""Runs with sizes for which wrong claims on sizes are not true.

A wrong claim may be true in every run that compares values: two symbols may have one size in all of them, and
``4*((width + 3)//4)`` is the width as long as this is a multiple of four. So the model also gets sizes that tell such
claims apart, as far as it accepts them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from modelexport.graph.sizes import SYMBOL
from modelexport.pytorch.other_sizes import small_sizes, symbol_sizes, with_sizes
from modelexport.verify.claimed_sizes import false_sizes
from modelexport.verify.verdicts import FalseClaim, OtherInputs

Inputs = Mapping[str, Any] | Sequence[Any]
Compare = Callable[[str, Inputs], OtherInputs]


def false_output_sizes(model: ir.Model, agreeing: Collection[tuple[Inputs, OtherInputs]]) -> Iterator[FalseClaim]:
    """The outputs that have other sizes than they declare in one of some runs, each once.

    Args:
        agreeing: Inputs, and what came of them.
    """
    told: set[str] = set()
    for inputs, one in agreeing:
        shapes = {output.name: tuple(output.shape) for output in one.outputs}
        for claim in false_sizes(model.graph.outputs, shapes, symbol_sizes(inputs, model)):
            if claim.where not in told:
                told.add(claim.where)
                yield claim


def run_with_telling_sizes(
    inputs: Inputs, model: ir.Model, tried: Sequence[Inputs], compared: Compare, *, small: Inputs | None
) -> list[tuple[Inputs, OtherInputs]]:
    """Run with sizes for which wrong claims are not true.

    A model may accept sizes that mean nothing, as more tokens than its mask has. So a run in which the file fails or
    has other shapes is not counted as a fault, and is not returned.

    Args:
        tried: The inputs that model and file ran with.
        compared: Compares the shapes of the outputs on inputs, with a description.
        small: A single row of small sizes, if model and file take that.
    """
    ran = [symbol_sizes(one, model) for one in tried]
    few = symbol_sizes(small, model) if small is not None else ran[0]
    sizes = {name: size if size > 1 else small_sizes(ran[0])[name] for name, size in few.items()}
    agreeing: list[tuple[Inputs, OtherInputs]] = []
    known: dict[tuple[tuple[str, int], ...], bool] = {}

    def agrees(changed: Mapping[str, int]) -> bool:
        key = tuple(changed.items())
        if key not in known:
            known[key] = runs_with(changed)
        return known[key]

    def runs_with(changed: Mapping[str, int]) -> bool:
        other = with_sizes(inputs, model, {**sizes, **changed})
        one = compared(f"another size of {', '.join(changed)}", other)
        if one.status == "agree":
            agreeing.append((other, one))
            ran.append(symbol_sizes(other, model))
        return one.status == "agree"

    def agree_with(names: Sequence[str], others: Callable[[int], Sequence[int]]) -> bool:
        ways = zip(*(others(sizes[name]) for name in names), strict=True)
        return any(agrees(dict(zip(names, way, strict=True))) for way in ways)

    def try_sizes(names: Sequence[str], others: Callable[[int], Sequence[int]]) -> None:
        if not agree_with(names, others) and len(names) > 1:
            for name in names:
                agree_with([name], others)

    # The model may not take odd sizes, or less than a kernel.
    even = [name for name in sizes if math.gcd(*(run[name] for run in ran)) > 1]
    try_sizes([n for n in even if sizes[n] > 3], lambda size: (size - 1, size + 1, size - 2, size - 3))
    spans = {name: (min(run[name] for run in ran), max(run[name] for run in ran)) for name in sizes}
    try_sizes([name for name, (least, most) in spans.items() if most < 2 * least], lambda size: (2 * size,))
    said = {name for value in model.graph.outputs for size in value.shape or () for name in SYMBOL.findall(str(size))}
    for pair in itertools.combinations(sorted(sizes, key=said.__contains__), 2):
        if pair[1] in said and all(run[pair[0]] == run[pair[1]] for run in ran):
            size = sizes[pair[0]]
            for other in (2 * size, size + 1, 1):  # a model may index the larger, or broadcast a size of one
                if sum(agrees({name: other}) for name in pair):
                    break
    return agreeing

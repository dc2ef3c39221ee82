"""Checks the sizes that a file declares for its inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from modelexport.graph.sizes import SYMBOL, put_size
from modelexport.verify.claimed_modules import false_claim
from modelexport.verify.verdicts import FalseClaim

Shapes = Mapping[str, tuple[int, ...]]


def false_sizes(values: Sequence[ir.Value], shapes: Shapes, known: Mapping[str, int]) -> Iterator[FalseClaim]:
    """The values that have other sizes in a run than they declare.

    Args:
        known: The sizes of symbols in this run. Another symbol has the size of the first axis that declares it alone.
    """
    sizes = dict(known)

    def is_true(claim: int | str | None, size: int) -> bool:
        if isinstance(claim, str) and SYMBOL.fullmatch(claim):
            return sizes.setdefault(claim, size) == size
        if isinstance(claim, str):
            claim = put_size(claim, {symbol: str(one) for symbol, one in sizes.items()})
        return not isinstance(claim, int) or claim == size  # with an unknown symbol it claims nothing

    for value in values:
        shape = shapes.get(value.name or "")
        if shape is None or value.shape is None:
            continue
        said = [size if isinstance(size, int) else size.value for size in value.shape]
        true = [is_true(claim, size) for claim, size in zip(said, shape, strict=False)]
        if len(said) != len(shape) or not all(true):
            yield from false_claim("metadata", value.name or "", said, list(shape))

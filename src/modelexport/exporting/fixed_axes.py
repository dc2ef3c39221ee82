"""Dynamic axes whose size a file fixes nevertheless: the model decided by it in Python, or made a constant of it.

A capture lets an axis stay dynamic, and follows the branch for the size of the example: position embeddings that are
interpolated for other sizes, a padding computed in Python, a size in a ``Reshape``. So the file runs with other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from modelexport.traces.array_differences import Verdict

if TYPE_CHECKING:
    import onnx_ir as ir

    from modelexport.pytorch.nested_tensors import Inputs
    from modelexport.verify.compared_runs import Compared


class FixedAxis(msgspec.Struct, frozen=True, kw_only=True):
    """A dynamic axis of an input that a file can only have in one size."""

    input: str
    axis: int
    symbol: str
    size: int
    call: str
    """The address of the call whose nodes fail, or differ, with another size; empty for the model itself."""
    reason: str
    """How the file fails or differs with another size."""


def fixed_axis_message(axis: FixedAxis) -> str:
    """One line that says what fixes an axis, and what to do."""
    return (
        f"{axis.call or 'the model itself'} fixes a size that was to be dynamic, {axis.symbol} (axis {axis.axis} of "
        f"{axis.input}): {axis.reason}; leave the axis out, or make the module compute the size"
    )


def axes_of(inputs: Inputs, model: ir.Model, symbol: str, result: Tried | None, decides: str = "") -> list[FixedAxis]:
    """The axes of a file whose size is a symbol, as fixed ones.

    Args:
        result: What happens with another size.
        decides: Which line of the model decides by it.
    """
    from modelexport.pytorch.inputs.other_sizes import symbol_sizes, symbols_by_input

    size = symbol_sizes(inputs, model)[symbol]
    reason = result.reason[:_REASON] if result is not None else ""
    reason = f"{reason} ({decides})" if reason and decides else reason or decides
    return [
        FixedAxis(input=name, axis=axis, symbol=symbol, size=size, call=result.call if result else "", reason=reason)
        for name, symbols in symbols_by_input(model).items()
        for axis, other in enumerate(symbols)
        if other == symbol
    ]


@dataclass(frozen=True)
class Tried:
    """A run with other sizes."""

    status: Verdict
    reason: str = ""
    call: str = ""
    """The call that fails, or whose nodes give another result."""


Run = Callable[[Mapping[str, int]], Tried | None]
"""Runs a model and its file with sizes; ``None`` if the inputs would be too large."""


def tried(compared: Compared) -> Tried:
    failed = compared.failed
    if failed is not None:
        return Tried("differ", str(failed), failed.call.address if failed.call is not None else "")
    if compared.located.pairs:
        blamed = next(iter(compared.located.blamed.items()), None)
        if blamed is not None:
            return Tried("differ", blamed[1][1], blamed[0].address)
        return Tried("differ", "the outputs are not PyTorch's")
    return Tried("agree" if compared.unknown is None else "not compared")


_REASON = 200
"""The largest number of characters of a reason in a message."""

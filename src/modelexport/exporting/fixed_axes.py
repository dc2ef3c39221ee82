"""Dynamic axes whose size a file fixes nevertheless: the model decided by it in Python, or made a constant of it.

A capture lets an axis stay dynamic, and follows the branch for the size of the example: position embeddings that are
interpolated for other sizes, a padding computed in Python, a size in a ``Reshape``. So the file runs with other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
    """What happens with another size."""


class FixedAxesError(Exception):
    """A file fixes the sizes of axes that are dynamic in it and need not be: it has to be made again without them."""

    def __init__(self, axes: Sequence[FixedAxis]) -> None:
        super().__init__(fixed_axis_message(axes[0]))
        self.axes = axes


def fixed_axis_message(axis: FixedAxis) -> str:
    """One line that says what fixes an axis, and what to do."""
    return (
        f"{axis.call or 'the model itself'} fixes a size that was to be dynamic, {axis.symbol} (axis {axis.axis} of "
        f"{axis.input}): {axis.reason}; leave the axis out, or make the module compute the size"
    )


def find_fixed_axes(inputs: Inputs, model: ir.Model, run: Run) -> list[FixedAxis]:
    """The dynamic axes of a file that fail, or give other results than the model, in any other size.

    Args:
        inputs: The example inputs; not changed.
        model: The file; its conditions of sizes hold in all runs.
        run: Runs the model and the file with sizes of the dynamic axes.
    """
    from modelexport.pytorch.inputs.other_sizes import changeable_sizes

    sizes = changeable_sizes(inputs, model)
    if not sizes:
        return []
    search = _Search(_runner(inputs, model, run))
    if not search.find_closed(sizes):
        return []
    call = next(filter(None, search.calls), "")
    return [fixed for symbol, reason in search.closed.items() for fixed in axes_of(inputs, model, symbol, reason, call)]


def axes_of(inputs: Inputs, model: ir.Model, symbol: str, reason: str, call: str = "") -> list[FixedAxis]:
    """The axes of a file whose size is a symbol, as fixed ones."""
    from modelexport.pytorch.inputs.other_sizes import symbol_sizes, symbols_by_input

    size = symbol_sizes(inputs, model)[symbol]
    return [
        FixedAxis(input=name, axis=axis, symbol=symbol, size=size, call=call, reason=reason[:_REASON])
        for name, symbols in symbols_by_input(model).items()
        for axis, other in enumerate(symbols)
        if other == symbol
    ]


def _runner(inputs: Inputs, model: ir.Model, run: Run) -> Callable[[Collection[str]], Tried]:
    """Compares the outputs with other sizes of some symbols, in the first two ways that the model accepts.

    One may agree by chance: ``int(0.75 * n)`` is 6 for 8 and for 9.
    """
    from modelexport.pytorch.inputs.other_sizes import WAYS, changed_sizes, symbol_sizes

    def compared(symbols: Collection[str]) -> Tried:
        if not symbols:
            return run(symbol_sizes(inputs, model)) or Tried("not compared")
        results: list[Tried] = []
        for way in WAYS:
            sizes = changed_sizes(inputs, model, way, symbols)
            result = run(sizes) if sizes is not None else None
            if result is not None and result.status != "not compared":
                results.append(result)
            if len(results) == _WAYS_NEEDED or (results and results[-1].status == "differ"):
                break
        return results[-1] if results else Tried("not compared")

    return compared


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


@dataclass
class _Search:
    """Finds the symbols whose sizes cannot change, in as few runs as possible."""

    run: Callable[[Collection[str]], Tried]

    def __post_init__(self) -> None:
        self.open: set[str] = set()
        self.closed: dict[str, str] = {}
        """Symbols that cannot change, to what happens."""
        self.calls: list[str] = []

    def find_closed(self, sizes: Mapping[str, int]) -> bool:
        """Fill ``closed``; whether any symbol cannot change."""
        whole = self._compared(sizes)
        # What differs with the sizes of the example is not due to any other size.
        if whole.status in ("agree", "tie") or self.run(()).status == "differ":
            return False
        by_size: dict[int, list[str]] = {}
        for symbol, size in sizes.items():
            by_size.setdefault(size, []).append(symbol)
        # What has the same size in the example may have to have it always.
        for group in by_size.values():
            together = self._compared(group)
            if together.status in ("agree", "tie"):
                self.open.update(group)
                continue
            alone = {symbol: self._compared([symbol]) for symbol in group} if len(group) > 1 else {group[0]: together}
            self.open.update(symbol for symbol, result in alone.items() if result.status in ("agree", "tie"))
            wrong = {symbol: result.reason for symbol, result in alone.items() if result.status == "differ"}
            if not wrong and together.status == "differ":  # the model accepts no other size of one of them alone
                wrong = {symbol: together.reason for symbol in group if symbol not in self.open}
            self.closed |= wrong
        rest = [symbol for symbol in sizes if symbol not in self.closed]
        while not self.closed and whole.status == "differ" and rest:  # only several sizes together show it
            last = rest.pop()
            if self.run(rest).status != "differ":
                self.closed[last] = whole.reason
        return bool(self.closed)

    def _compared(self, symbols: Collection[str]) -> Tried:
        result = self.run({*self.open, *symbols})
        if result.status == "differ":
            self.calls.append(result.call)
        return result


_WAYS_NEEDED = 2
_REASON = 200
"""The largest number of characters of a reason in a message."""

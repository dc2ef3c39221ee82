"""Dynamic axes whose size a file fixes nevertheless: the model decided by it in Python, or made a constant of it.

A capture lets an axis stay dynamic, and follows the branch for the size of the example: position embeddings that are
interpolated for other sizes, a padding computed in Python, a size in a ``Reshape``. So the file runs with other sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from modelexport.files.onnx_models import load_onnx
from modelexport.format import documents
from modelexport.graph.requested import requested_outputs
from modelexport.verify.verdicts import OtherInputs, VerifyReport

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import nn

Inputs = Mapping[str, Any] | Sequence[Any]


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
        super().__init__(told_of_fixed(axes[0]))
        self.axes = axes


def told_of_fixed(axis: FixedAxis) -> str:
    """One line that says what fixes an axis, and what to do."""
    return (
        f"{axis.call or 'the model itself'} fixes a size that was to be dynamic, {axis.symbol} (axis {axis.axis} of "
        f"{axis.input}): {axis.reason}; leave the axis out, or make the module compute the size"
    )


def find_fixed_axes(
    model: nn.Module,
    inputs: Inputs,
    path: Path,
    hierarchy: documents.Hierarchy,
    verify: Callable[[], VerifyReport],
) -> list[FixedAxis]:
    """The dynamic axes of a file that fail, or give other results than the model, in any other size.

    Args:
        inputs: The example inputs; not changed.
        path: The file, in a place where it can be run.
        verify: Compares its calls with those of the model, to name the call that fixes a size.
    """
    from modelexport.pytorch.other_sizes import dynamic_axes, given_sizes

    file = load_onnx(path)
    sizes = given_sizes(inputs, file)
    if not sizes:
        return []
    search = _Search(_runner(model, inputs, path, file))
    if not search.symbols(sizes):
        return []
    call = _call_of(search.reasons, hierarchy)
    report = verify() if call is None else None
    if report is not None and report.diverging is not None:
        call = report.diverging.address
    return [
        FixedAxis(
            input=name,
            axis=axis,
            symbol=symbol,
            size=sizes[symbol],
            call=call or "",
            reason=_short(search.closed[symbol]),
        )
        for name, symbols in dynamic_axes(file).items()
        for axis, symbol in enumerate(symbols)
        if symbol in search.closed
    ]


def _runner(model: nn.Module, inputs: Inputs, path: Path, file: ir.Model) -> Callable[[Collection[str]], OtherInputs]:
    """Compares the outputs with other sizes of some symbols, in the first way that the model accepts."""
    from modelexport.pytorch.other_sizes import WAYS, resized
    from modelexport.runtime.sessions import open_session
    from modelexport.verify.given_choices import run_in_double, run_with_choices
    from modelexport.verify.others import run_one
    from modelexport.verify.outputs import run_module

    session = open_session(path, optimized=False)

    def right(other: Inputs) -> list[Any]:
        return requested_outputs(file.metadata_props, run_module(model, other))

    def compared(symbols: Collection[str]) -> OtherInputs:
        for way in WAYS:
            other = resized(inputs, file, way, symbols)
            found = run_one(way, other, session, right)
            if found.status == "differ" and found.outputs:
                agrees = partial(_agrees, right(other))
                fed, _ = run_with_choices(model, other, path)
                if fed and agrees(fed):
                    found = msgspec.structs.replace(found, status="tie")
                elif run_in_double(other, path, agrees)[0]:
                    found = msgspec.structs.replace(found, status="agree")
            if found.status != "not compared":
                break
        return found

    return compared


def _agrees(right: Sequence[Any], found: Mapping[str, Any]) -> bool:
    from modelexport.verify.differences import compare_outputs
    from modelexport.verify.matching import WHOLE_UNITS

    again = compare_outputs(list(found), right, list(found.values()), units=WHOLE_UNITS)
    return all(one.status == "agree" for one in again)


@dataclass
class _Search:
    """Finds the symbols whose sizes cannot change, in as few runs as possible."""

    run: Callable[[Collection[str]], OtherInputs]

    def __post_init__(self) -> None:
        self.open: set[str] = set()
        self.closed: dict[str, str] = {}
        """Symbols that cannot change, to what happens."""
        self.reasons: list[str] = []

    def symbols(self, sizes: Mapping[str, int]) -> bool:
        """Whether there are any."""
        whole = self._tried(sizes)
        if whole.status in ("agree", "tie"):
            return False
        by_size: dict[int, list[str]] = {}
        for symbol, size in sizes.items():
            by_size.setdefault(size, []).append(symbol)
        # What has the same size in the example may have to have it always.
        for group in by_size.values():
            if self._tried(group).status in ("agree", "tie"):
                self.open.update(group)
                continue
            for symbol in group:
                one = self._tried([symbol])
                if one.status in ("agree", "tie"):
                    self.open.add(symbol)
                elif one.status == "differ":
                    self.closed[symbol] = one.reason
        if not self.closed and whole.status == "differ":
            self.closed = {symbol: whole.reason for symbol in sizes if symbol not in self.open}
        return bool(self.closed)

    def _tried(self, symbols: Collection[str]) -> OtherInputs:
        found = self.run({*self.open, *symbols})
        if found.status == "differ":
            self.reasons.append(found.reason)
        return found


def _short(reason: str) -> str:
    """What ONNX Runtime says of a failure, without its places in its own code."""
    told = re.search(r"while running (\w+) node\. Name:'([^']*)'", reason)
    return f"{told[1]} {told[2]} fails" if told is not None else reason[:_REASON]


_REASON = 200
"""The largest number of characters of a reason in a message."""


def _call_of(reasons: Sequence[str], hierarchy: documents.Hierarchy) -> str | None:
    """The call whose node fails, if ONNX Runtime names the node."""
    for reason in reasons:
        told = re.search(r"Name:'([^']*)'", reason)
        node = next((node for node in hierarchy.nodes if told is not None and node.name == told[1]), None)
        if node is not None:
            return node.call
    return None

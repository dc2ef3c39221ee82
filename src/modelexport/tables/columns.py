"""The columns of a table of figures: the quantity, its unit, and how figures are combined."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from modelexport.core.text import suggest
from modelexport.errors import UsageError

Side = Literal["own", "total"]

Figure = Any
"""A number."""


class Kind(enum.StrEnum):
    """How the figures of several nodes or calls are combined."""

    SUM = "sum"
    """The sum. Figures are integers in units of ``1 / scale``, so that sums are exact."""
    LARGEST = "largest"
    """The maximum: memory in use at one time, errors."""
    SMALLEST = "smallest"
    """The minimum."""
    RATIO = "ratio"
    """The sum of one column divided by the sum of another."""
    SPREAD = "spread"
    """The interquartile range of the runs."""


@dataclass(frozen=True)
class Column:
    """One column."""

    name: str
    unit: str
    kind: Kind = Kind.SUM
    scale: int = 1
    of: tuple[str, str] = ("", "")
    """The columns of a ratio; with ``share``, the second is summed over the whole file."""
    share: bool = False
    hidden: bool = False
    """Whether it is only needed for a ratio and not shown."""

    def number(self, figure: Figure) -> Figure:
        """A figure in the unit of the column, for JSON."""
        return figure / self.scale if self.scale > 1 else figure


COMBINED = (Kind.SUM, Kind.LARGEST, Kind.SMALLEST)
"""Kinds of columns whose figures nodes have themselves."""


def column_named(columns: Iterable[Column], name: str) -> Column:
    """The shown column with a name."""
    shown = {column.name: column for column in columns if not column.hidden}
    if name not in shown:
        raise UsageError(f"there is no column '{name}'{suggest(name, shown)}; the columns are {', '.join(shown)}")
    return shown[name]


def sorted_by(columns: Iterable[Column], sort: str) -> tuple[Column, Side]:
    """The column and its figures that ``seconds``, ``own.seconds`` (the same) or ``total.seconds`` sorts by."""
    side, _, name = sort.rpartition(".")
    own = side in ("", "own")
    return column_named(columns, name if own or side == "total" else sort), "own" if own else "total"


PARAMETERS = Column("parameters", "elements")
BUFFERS = Column("buffers", "elements")
"""Entries of the ``state_dict`` that are not parameters, such as the statistics of a batch normalization."""
BYTES = Column("bytes", "bytes")
BITS = Column("bits", "bits", hidden=True)
"""Of the initializers that are parameters or computed from them, such as their scales."""
HELD = Column("held", "elements", hidden=True)
"""Elements of parameters that these hold, of a packed one those that it packs."""
PRECISION = Column("precision", "bits an element", Kind.RATIO, of=("bits", "held"))
MACS = Column("macs", "multiply-adds")
FLOPS = Column("flops", "operations")
ACTIVATION_BYTES = Column("activation_bytes", "bytes")
MOVED_BYTES = Column("moved_bytes", "bytes", hidden=True)
INTENSITY = Column("intensity", "operations per byte", Kind.RATIO, of=("flops", "moved_bytes"))
PEAK_BYTES = Column("peak_bytes", "bytes", Kind.LARGEST)
SECONDS = Column("seconds", "seconds", scale=10**9)
NODE_SECONDS = Column("node_seconds", "seconds", scale=10**9, hidden=True)
"""Without what a run takes beside its nodes, which has no share of their time."""
SHARE = Column("share", "of the time of nodes", Kind.RATIO, of=("node_seconds", "node_seconds"), share=True)
SPREAD = Column("spread", "seconds", Kind.SPREAD, scale=10**9, of=("seconds", ""))
ERROR = Column("error", "error, share of size", Kind.LARGEST)
SENSITIVITY = Column("sensitivity", "relative error of the output", Kind.LARGEST)
SMALLEST = Column("smallest", "value", Kind.SMALLEST)
LARGEST = Column("largest", "value", Kind.LARGEST)
COUNTED = Column("counted", "elements", hidden=True)
"""Of the computed values, those that are neither NaN nor infinite."""
SIZES = Column("sizes", "sum of sizes", hidden=True)
MEAN_SIZE = Column("mean_size", "mean size of an element", Kind.RATIO, of=("sizes", "counted"))
ZERO = Column("zero_elements", "elements", hidden=True)
ZEROS = Column("zeros", "of the elements", Kind.RATIO, of=("zero_elements", "counted"))
NAN = Column("nan", "elements")
INFINITE = Column("infinite", "elements")
IN_FLOAT16 = Column("float16", "of the largest number of float16", Kind.LARGEST)
LOST = Column("lost_elements", "elements", hidden=True)
LOST_IN_FLOAT16 = Column(
    "float16_lost", "of the elements, zero in float16 alone", Kind.RATIO, of=("lost_elements", "counted")
)
IN_BFLOAT16 = Column("bfloat16", "of the largest number of bfloat16", Kind.LARGEST)
VALUES = (
    LARGEST, SMALLEST, MEAN_SIZE, ZEROS, NAN, INFINITE, IN_FLOAT16, LOST_IN_FLOAT16, IN_BFLOAT16,
    COUNTED, SIZES, ZERO, LOST,
)  # fmt: skip
"""The columns of the values that a file computes."""
COST = (
    PARAMETERS, BUFFERS, BYTES, BITS, HELD, PRECISION, MACS, FLOPS, ACTIVATION_BYTES, MOVED_BYTES, INTENSITY, PEAK_BYTES
)  # fmt: skip
"""The columns of the cost."""
PROFILE = (SECONDS, NODE_SECONDS, SHARE, SPREAD, PEAK_BYTES)
"""The columns of a profile; the last is left out where ONNX Runtime does not tell the memory of nodes."""
AGAINST = Column("against_seconds", "seconds", scale=10**9)
RATIO = Column("against_ratio", "of seconds", Kind.RATIO, of=("against_seconds", "seconds"))

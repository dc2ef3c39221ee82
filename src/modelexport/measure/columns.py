"""The columns of a table of figures: what each is a figure of, in which unit, and how figures become one."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

Figure = Any
"""A number; or a formula of symbols (a sympy expression) where sizes are dynamic."""


class Kind(enum.StrEnum):
    """How the figures of several nodes or calls become one."""

    SUM = "sum"
    """They add up. Figures are whole numbers of ``1 / scale`` units, so that they add up exactly."""
    LARGEST = "largest"
    """The largest counts: memory that is in use at one time, errors."""
    RATIO = "ratio"
    """The sum of one column divided by that of another."""
    SPREAD = "spread"
    """The range that the middle half of the runs is in."""


@dataclass(frozen=True)
class Column:
    """One column."""

    name: str
    unit: str
    kind: Kind = Kind.SUM
    scale: int = 1
    of: tuple[str, str] = ("", "")
    """The columns that a ratio is of; the sum of the second over the whole file where ``share`` is set."""
    share: bool = False
    hidden: bool = False
    """Needed for a ratio and not shown."""

    def number(self, figure: Figure) -> Figure:
        """A figure in the unit of the column, as JSON has it: a formula is text."""
        if hasattr(figure, "free_symbols"):
            return int(figure) if figure.is_Integer else float(figure) if figure.is_number else str(figure)
        return figure / self.scale if self.scale > 1 else figure


PARAMETERS = Column("parameters", "elements")
BYTES = Column("bytes", "bytes")
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
ERROR = Column("error", "largest absolute difference", Kind.LARGEST)
SENSITIVITY = Column("sensitivity", "relative error of the output", Kind.LARGEST)

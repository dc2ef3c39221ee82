"""What `split`, `replace`, `place` and `rename` show a person."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from modelexport.core.text import align, plural

if TYPE_CHECKING:
    from modelexport.surgery.replacing import Replaced
    from modelexport.surgery.splitting import Split


def format_split(result: Split) -> str:
    """The stages, one a line, and how even they are."""
    rows = [("STAGE", "WEIGHTS", result.by.upper(), "NODES", "IN", "OUT", "MODULES")]
    rows += [
        (
            stage.file,
            megabytes(stage.bytes),
            f"{stage.share:.1%}",
            f"{stage.nodes:,}",
            str(len(stage.inputs)),
            str(len(stage.outputs)),
            _modules(stage.modules, stage.parts_of),
        )
        for stage in result.stages
    ]
    over = result.largest / result.best - 1 if result.best else 0.0
    even = "as even as module boundaries allow" if over < 0.0005 else f"{over:.1%} above the most even cut"
    cross = ", ".join(map(str, result.crossing)) or "none"
    return (
        f"{align(rows, right={1, 2, 3, 4, 5})}\n{result.path}: {plural(len(result.stages), 'stage')}, the largest "
        f"{even}; values that cross each cut: {cross}"
    )


def format_replaced(result: Replaced) -> str:
    """The calls that were replaced, one a line."""
    rows = [("CALL", "REMOVED", "ADDED", "INPUTS", "OUTPUTS")]
    rows += [
        (call.call, f"{call.removed:,}", f"{call.added:,}", ", ".join(call.inputs), ", ".join(call.outputs))
        for call in result.calls
    ]
    return (
        f"{align(rows, right={1, 2})}\n{result.path}: {plural(len(result.calls), 'call')} replaced by {result.by}, "
        f"{plural(result.kept, 'node')} as before"
    )


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count:,} B"


def _modules(whole: Sequence[str], parts_of: Sequence[str]) -> str:
    """The first and last module that a stage has whole, and what it has a part of."""
    text = whole[0] if len(whole) == 1 else f"{whole[0]} to {whole[-1]}" if whole else ""
    parts = ", ".join(name for name in parts_of if name != ".")
    return f"{text}{f' (part of {parts})' if parts else ''}".strip()

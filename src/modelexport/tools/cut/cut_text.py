"""What extract, split and replace wrote, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from modelexport.core.text import align, bytes_text, plural

if TYPE_CHECKING:
    from modelexport.tools.cut.extraction import Extracted
    from modelexport.tools.cut.replacing import Replaced
    from modelexport.tools.cut.splitting import Split


def format_extracted(extracted: Sequence[Extracted]) -> str:
    """Extracted calls: a line for each, then its inputs and outputs."""
    lines = []
    for call in extracted:
        borrowed = f", {call.borrowed} of them from other calls" if call.borrowed else ""
        lines.append(
            f"{call.call} -> {call.path} ({plural(call.nodes, 'node')}{borrowed}; {call.bytes:,} bytes of weights)"
        )
        for side, values in (("in ", call.inputs), ("out", call.outputs)):
            lines += [f"  {side} {v.name} {v.dtype}[{', '.join(map(str, v.shape))}]" for v in values]
    return "\n".join(lines)


def format_split(result: Split) -> str:
    """The stages, one on each line, and their balance."""
    rows: list[tuple[object, ...]] = [("STAGE", "WEIGHTS", result.by.upper(), "NODES", "IN", "OUT", "MODULES")]
    for stage in result.stages:
        sizes = bytes_text(stage.bytes), f"{stage.share:.1%}", stage.nodes, len(stage.inputs), len(stage.outputs)
        rows.append((stage.file, *sizes, _modules_text(stage.modules, stage.parts_of)))
    over = result.largest / result.best - 1 if result.best else 0.0
    even = "as even as module boundaries allow" if over < 0.0005 else f"{over:.1%} above the most even cut"
    cross = ", ".join(map(str, result.crossing)) or "none"
    return (
        f"{align(rows, right={1, 2})}\n{result.path}: {plural(len(result.stages), 'stage')}, the largest "
        f"{even}; values that cross each cut: {cross}"
    )


def _modules_text(whole: Sequence[str], parts_of: Sequence[str]) -> str:
    """The first and last complete module of a stage, and the modules of which it has some nodes."""
    text = whole[0] if len(whole) == 1 else f"{whole[0]} to {whole[-1]}" if whole else ""
    parts = ", ".join(name for name in parts_of if name != ".")
    return f"{text}{f' (part of {parts})' if parts else ''}".strip()


def format_replaced(result: Replaced) -> str:
    """The calls that were replaced, one on each line."""
    rows: list[tuple[object, ...]] = [("CALL", "REMOVED", "ADDED", "INPUTS", "OUTPUTS")]
    rows += [
        (call.call, call.removed, call.added, ", ".join(call.inputs), ", ".join(call.outputs)) for call in result.calls
    ]
    return (
        f"{align(rows)}\n{result.path}: {plural(len(result.calls), 'call')} replaced by {result.by}, "
        f"{plural(result.kept, 'node')} unchanged"
    )

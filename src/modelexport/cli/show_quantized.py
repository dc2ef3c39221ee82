"""The results of ``quantize`` as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from modelexport.core.text import first_few, plural, shortened
from modelexport.tagged.tree import format_coverage

if TYPE_CHECKING:
    from modelexport.precision.quantize import QuantizeResult


def format_quantized(results: Mapping[str, QuantizeResult], source: Path, output: Path) -> str:
    """What was quantized and what was kept, with the commands that check it."""
    lines: list[str] = []
    for name, result in results.items():
        before, after = result.bytes_before / 1e6, result.bytes_after / 1e6
        lines.append(f"{name or result.path}: {after:,.1f} MB of weights, from {before:,.1f} MB")
        lines += [f"  {method}: {plural(count, 'node')}" for method, count in result.methods.items()]
        if not result.methods:
            lines.append("  no node was quantized: the methods do not quantize what these modules consist of")
        if result.kept:
            lines.append(f"  kept, bit for bit: {first_few(result.kept, 3)}")
        lines += [f"  {shortened(line, 200)}" for line in result.joined[:10]]
        if len(result.joined) > 10:
            lines.append(f"  and {len(result.joined) - 10} more; --json lists all")
        lines.append(f"  {format_coverage(result.coverage)}")
    lines.append(f"wrote {output if len(results) > 1 or '' not in results else ', '.join(results[''].files)}")
    if source.is_dir():
        return "\n".join(lines)
    lines.append(
        f"next: modelexport verify {source} --against {output}; modelexport profile {source} --against {output}"
    )
    return "\n".join(lines)

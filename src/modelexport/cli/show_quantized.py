"""The results of ``quantize`` as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from modelexport.core.text import align, first_few, plural, rest_of, shortened
from modelexport.tagged.tree import format_coverage

if TYPE_CHECKING:
    from modelexport.precision.quantize import QuantizeResult
    from modelexport.precision.search import SearchResult


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
        lines += rest_of(result.joined, 10)
        lines.append(f"  {format_coverage(result.coverage)}")
    lines.append(f"wrote {output if len(results) > 1 or '' not in results else ', '.join(results[''].files)}")
    if source.is_dir():
        return "\n".join(lines)
    lines.append(
        f"next: modelexport verify {source} --against {output}; modelexport profile {source} --against {output}"
    )
    return "\n".join(lines)


def format_search(found: SearchResult) -> str:
    """What a search chose and why, and how far the result was from what was asked for."""
    chosen_by, judged_on = found.runs
    lines = [
        f"{found.metric} {found.judged:.4g} on {plural(judged_on, 'input')} that were not used to choose",
        f"  {found.seen:.4g} on the {chosen_by} used to choose, where every module at its cheapest "
        f"has {found.cheapest:.4g}",
        f"  {found.bytes_after / 1e6:,.1f} MB of weights, from {found.bytes_before / 1e6:,.1f} MB",
    ]
    if not found.met:
        lines.insert(0, f"not met: {found.bound}; nothing was written. This is how close it came:")
    if found.judgements > 1:
        lines.append(f"judged {found.judgements} times, since the first choices were not within the bound there")
    lines.append(f"{len(found.changed)} of {plural(found.modules, 'module')} or groups are not at their cheapest:")
    rows = [["METHOD", "ALONE", "COSTS", "MODULES"]]
    for one in found.changed[:_SHOWN]:
        cost = f"{one.cost * 1e6:,.0f} us" if found.saved == "time" else f"{one.cost / 1e3:,.0f} kB"
        rows.append([one.method, f"{one.loss:.3g}", cost, shortened(first_few(one.calls), 80)])
    if found.changed:
        lines += [f"  {line}" for line in align(rows, right={1, 2}).splitlines()]
    return "\n".join([*lines, *rest_of(found.changed, _SHOWN)])


_SHOWN = 12

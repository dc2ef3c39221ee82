"""What quantize wrote, and what its search found, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from modelexport.core.text import align, bytes_text, first_few, plural, rest_of, shortened
from modelexport.runtime.saturating_products import format_saturation
from modelexport.tables.turns import turns_line
from modelexport.tagged.tree_display import format_coverage
from modelexport.terminal.printing import command_line, next_steps

if TYPE_CHECKING:
    from modelexport.tools.quantize.quantize import QuantizeResult
    from modelexport.tools.quantize.search_within_bound import SearchResult


_MOST_CHANGED = 12


def format_quantized(
    results: Mapping[str, QuantizeResult], source: Path, output: Path, data: Path | None = None
) -> str:
    """What was quantized and what was kept, with the commands that check it, on the data that was used."""
    lines: list[str] = []
    for name, result in results.items():
        after, before = bytes_text(result.bytes_after), bytes_text(result.bytes_before)
        lines.append(f"{name or result.path}: {after} of weights, from {before}")
        lines += [f"  {method}: {plural(count, 'node')}" for method, count in result.methods.items()]
        if not result.changed:
            why = "the methods do not quantize what these modules consist of"
            lines.append(f"  no node was quantized: {'all modules are kept' if '.' in result.kept else why}")
        elif not result.methods:
            lines.append(f"  no node was quantized: {plural(result.quantized_before, 'node', 'are')} quantized already")
        if result.left:
            size, share = sum(result.left.values()), sum(result.left.values()) / max(result.bytes_after, 1)
            lines.append(f"  left in float: {bytes_text(size)}, {share:.0%} of the bytes: {first_few(result.left, 3)}")
        if result.kept:
            lines.append(f"  kept, bit for bit: {first_few(result.kept, 3)}")
        lines += [f"  {shortened(line, 200)}" for line in result.joined[:10]]
        lines += rest_of(result.joined, 10)
        lines += [f"  {line}" for line in format_saturation(result.saturating, result.path)]
        lines.append(f"  {format_coverage(result.coverage)}")
        for use, turns in result.times.items():
            line = turns_line(turns, source.name, output.name)
            lines.append(f"  {use}: {line}" if use else f"  {line}")
            if turns.slower:
                lines.append("  slower here: --least time, beside --data and --within, finds methods that are faster")
    lines.append(f"wrote {output if len(results) > 1 or '' not in results else ', '.join(results[''].files)}")
    if source.is_dir() or not any(result.methods for result in results.values()):
        return "\n".join(lines)
    on = ("--data", data) if data is not None else ("--numbers",)
    compared, timed = ("compare", source, output, *on), ("profile", source, "--against", output)
    lines.append(next_steps(command_line(*compared), command_line(*timed)))
    return "\n".join(lines)


def format_search(result: SearchResult) -> str:
    """What a search chose and why, and how far the result was from what was asked for."""
    chosen_by, judged_on = result.runs
    batches = f", {result.in_batches:.4g} in padded batches of them" if result.in_batches is not None else ""
    lines = [
        f"{result.metric} {result.judged:.4g} on {plural(judged_on, 'input', 'that were')} not used to choose{batches}",
        f"  {result.seen:.4g} on the {chosen_by} used to choose, where every module at its cheapest "
        f"has {result.cheapest:.4g}",
        f"  {bytes_text(result.bytes_after)} of weights, from {bytes_text(result.bytes_before)}",
    ]
    if not result.met:
        lines.insert(0, f"not met: {result.bound}; nothing was written. This is how close it came:")
    elif not result.of_use:
        nothing = "nothing is faster here" if result.least == "time" else "every module is kept"
        lines.insert(0, f"within {result.bound} {nothing}: the file stays as it is, nothing was written")
    if result.times is not None and not result.of_use:
        lines.append(f"  {turns_line(result.times, 'the file', 'the best choice')}")
    if result.judgements > 1:
        lines.append(f"judged {result.judgements} times, since the first choices were not within the bound there")
    cheapest = "fastest" if result.least == "time" else "cheapest"
    all_modules = f"{plural(result.modules, 'module')} or groups"
    changed = f"{len(result.changed)} of {all_modules} use more than the {cheapest} method"
    lines.append(changed + ":" * bool(result.changed))
    rows = [["METHOD", "ALONE", "COSTS", "MODULES"]]
    for change in result.changed[:_MOST_CHANGED]:
        cost = f"{change.cost * 1e6:,.0f} us" if result.least == "time" else f"{change.cost / 1e3:,.0f} kB"
        rows.append([change.method, f"{change.loss:.3g}", cost, _grouped(change.calls)])
    if result.changed:
        lines += [f"  {line}" for line in align(rows, right={1, 2}).splitlines()]
    lines += rest_of(result.changed, _MOST_CHANGED)
    if result.least == "time":
        lines.append(f"for {result.kept} of {all_modules} no method is faster here, beyond the noise")
    return "\n".join(lines)


def _grouped(calls: Sequence[str]) -> str:
    """The addresses of a group: ``layer.0.attention: query, key, value`` if one module has them all."""
    inside = {call.rpartition(".")[0] for call in calls}
    if len(calls) == 1 or len(inside) > 1 or inside == {""}:
        return shortened(first_few(calls), 80)
    return f"{inside.pop()}: {first_few(call.rpartition('.')[2] for call in calls)}"

"""The results of commands that make a file from another as text, and as JSON if that is not the result itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport.cli.printing import command_line
from modelexport.core.text import align, bytes_text, first_few, plural, rest_of, shortened
from modelexport.tagged.tree_display import format_coverage, format_tree
from modelexport.traces.array_differences import worst

if TYPE_CHECKING:
    from modelexport.lineage.adoption import Adopted
    from modelexport.lineage.retagging import RetagReport
    from modelexport.precision.quantize import QuantizeResult
    from modelexport.precision.search_within_bound import SearchResult
    from modelexport.surgery.extraction import Extracted
    from modelexport.surgery.lora_adapters import AdapterFile, AdapterInputs, MergedAdapters
    from modelexport.surgery.placing import Placement
    from modelexport.surgery.replacing import Replaced
    from modelexport.surgery.splitting import Split
    from modelexport.traces.array_differences import Difference


_MOST = 20
"""Lines of one kind."""
_MOST_CHANGED = 12
_STATES = {"torn": "split", "elsewhere": "elsewhere", "no provider": "no provider available"}


def format_retag(report: RetagReport) -> str:
    """The facts that are known about a retagged file, and those that are not."""
    common = f"{report.common:,} of {plural(report.values, 'value')} come from the tagged file"
    lines = [f"{format_coverage(report.coverage)}; {common}"]
    for title, nodes in (("contain operations of several", report.fused), ("are between several", report.unclear)):
        if nodes:
            lines += ["", f"{plural(len(nodes), 'node')} that {title} calls:"]
            rows = [(f"  {n.op_type}", n.name, first_few(n.calls, 4)) for n in nodes[:_MOST]]
            lines += [align(rows), *rest_of(nodes, _MOST)]
    if report.initializers:
        count = plural(len(report.initializers), "initializer")
        lines += ["", f"{count} that may come from any of these parameters:"]
        lines += [f"  {changed.name}: {', '.join(changed.parameter)}" for changed in report.initializers[:_MOST]]
        lines += rest_of(report.initializers, _MOST)
    lines.append("")
    if report.unrecorded:
        count = plural(report.unrecorded, "initializer")
        lines.append(f"{count} changed in a way that is not recorded: update-weights refuses them")
    if report.lost:
        lines.append(f"folded and lost: {shortened(', '.join(report.lost), 200)}")
    if report.gone:
        lines.append(f"{plural(len(report.gone), 'call')} without nodes now: {shortened(', '.join(report.gone), 200)}")
    if report.inlined:
        lines.append("local functions were inlined")
    if report.outputs is not None and (largest := worst(report.outputs)) is not None:
        lines.append(f"outputs compared with {plural(len(report.tried), 'input')}: {_how_far(largest)}")
    elif report.tried:
        lines.append(f"outputs were not compared: {shortened(report.tried[0], 200)}")
    return "\n".join([*lines, f"wrote {', '.join(report.files)}"])


def _how_far(largest: Difference) -> str:
    if largest.status == "not compared":
        return f"{largest.name} was not compared ({largest.reason})"
    return f"{largest.name} is off by {largest.relative or 0:.1e} of its size, most of all"


def format_adopted(adopted: Adopted) -> str:
    """The facts about an adopted file: tree, coverage, sources, and what could not be determined."""
    sources = ", ".join(f"{source} {count:,}" for source, count in adopted.sources.items())
    lines = [format_tree(adopted.tree, adopted.coverage), f"sources: {sources or 'none'}"]
    if adopted.repeated:
        lines.append(f"may be several calls that look like one: {first_few(path or '.' for path in adopted.repeated)}")
    return "\n".join([*lines, f"wrote {', '.join(adopted.files)}"])


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
            lines.append(f"  no node was quantized: {plural(result.quantized_before, 'node')} are quantized already")
        if result.left:
            size, share = sum(result.left.values()), sum(result.left.values()) / max(result.bytes_after, 1)
            lines.append(f"  left in float: {bytes_text(size)}, {share:.0%} of the bytes: {first_few(result.left, 3)}")
        if result.kept:
            lines.append(f"  kept, bit for bit: {first_few(result.kept, 3)}")
        lines += [f"  {shortened(line, 200)}" for line in result.joined[:10]]
        lines += rest_of(result.joined, 10)
        lines.append(f"  {format_coverage(result.coverage)}")
    lines.append(f"wrote {output if len(results) > 1 or '' not in results else ', '.join(results[''].files)}")
    if source.is_dir():
        return "\n".join(lines)
    both, on = (source, "--against", output), ("--data", data) if data is not None else ()
    lines.append(f"next: {command_line('verify', *both, *on)}; {command_line('profile', *both)}")
    return "\n".join(lines)


def format_search(result: SearchResult) -> str:
    """What a search chose and why, and how far the result was from what was asked for."""
    chosen_by, judged_on = result.runs
    batches = f", {result.in_batches:.4g} in padded batches of them" if result.in_batches is not None else ""
    lines = [
        f"{result.metric} {result.judged:.4g} on {plural(judged_on, 'input')} that were not used to choose{batches}",
        f"  {result.seen:.4g} on the {chosen_by} used to choose, where every module at its cheapest "
        f"has {result.cheapest:.4g}",
        f"  {bytes_text(result.bytes_after)} of weights, from {bytes_text(result.bytes_before)}",
    ]
    if not result.met:
        lines.insert(0, f"not met: {result.bound}; nothing was written. This is how close it came:")
    if result.judgements > 1:
        lines.append(f"judged {result.judgements} times, since the first choices were not within the bound there")
    changed = f"{len(result.changed)} of {plural(result.modules, 'module')} or groups use more than the cheapest method"
    lines.append(changed + ":" * bool(result.changed))
    rows = [["METHOD", "ALONE", "COSTS", "MODULES"]]
    for change in result.changed[:_MOST_CHANGED]:
        cost = f"{change.cost / 1e3:,.0f} kB"
        rows.append([change.method, f"{change.loss:.3g}", cost, _grouped(change.calls)])
    if result.changed:
        lines += [f"  {line}" for line in align(rows, right={1, 2}).splitlines()]
    return "\n".join([*lines, *rest_of(result.changed, _MOST_CHANGED)])


def _grouped(calls: Sequence[str]) -> str:
    """The addresses of a group: ``layer.0.attention: query, key, value`` if one module has them all."""
    inside = {call.rpartition(".")[0] for call in calls}
    if len(calls) == 1 or len(inside) > 1 or inside == {""}:
        return shortened(first_few(calls), 80)
    return f"{inside.pop()}: {first_few(call.rpartition('.')[2] for call in calls)}"


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
        rows.append((stage.file, *sizes, _modules(stage.modules, stage.parts_of)))
    over = result.largest / result.best - 1 if result.best else 0.0
    even = "as even as module boundaries allow" if over < 0.0005 else f"{over:.1%} above the most even cut"
    cross = ", ".join(map(str, result.crossing)) or "none"
    return (
        f"{align(rows, right={1, 2})}\n{result.path}: {plural(len(result.stages), 'stage')}, the largest "
        f"{even}; values that cross each cut: {cross}"
    )


def format_chain(differences: Sequence[Difference]) -> str:
    """Each output of the stages, and its difference from that of the whole file."""
    return "\n".join(
        f"{difference.name}: {difference.status}"
        + (f", {difference.absolute:.1e}" if difference.absolute is not None else "")
        + (f" ({difference.reason})" if difference.reason else "")
        for difference in differences
    )


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


def format_placement(placement: Placement, output: Path | None, libraries: Mapping[str, Path]) -> str:
    """The device of each module and where it runs, the faults, and Python code that opens such a session."""
    rows = [("MODULE", "RULE", "WENT TO", "")]
    for call in placement.calls:
        went = ", ".join(f"{provider} {count}" for provider, count in call.providers.items()) or "-"
        rows.append((call.call, call.device, went, _STATES.get(call.state or "", "")))
    sent = ", ".join(f"{plural(count, 'node')} to {device}" for device, count in placement.nodes.items())
    lines = [align(rows), f"{sent}; {plural(placement.unplaced, 'node')} without a rule", ""]
    return "\n".join([*lines, _python(placement, output, libraries)])


def _python(placement: Placement, output: Path | None, libraries: Mapping[str, Path]) -> str:
    lines = ["import onnxruntime", ""]
    lines += [
        f'onnxruntime.register_execution_provider_library("{name}", "{path}")' for name, path in libraries.items()
    ]
    lines.append("options = onnxruntime.SessionOptions()")
    if output is not None:
        lines[0] = "import json\n\nimport onnxruntime"
        lines.append(f'for key, value in json.load(open("{output}"))["config_entries"].items():')
        lines.append("    options.add_session_config_entry(key, value)")
    else:
        lines.append(f'options.add_session_config_entry("session.layer_assignment_settings", "{placement.settings}")')
    names = [name for name in placement.providers if name not in libraries]
    if libraries:
        lines.append("for device in onnxruntime.get_ep_devices():")
        lines.append(f"    if device.ep_name in {list(libraries)}:")
        lines.append("        options.add_provider_for_devices([device], {})")
        lines.append(f'session = onnxruntime.InferenceSession("{placement.path}", options)')
    else:
        lines.append(f'session = onnxruntime.InferenceSession("{placement.path}", options, providers={names})')
    return "\n".join(lines)


def _modules(whole: Sequence[str], parts_of: Sequence[str]) -> str:
    """The first and last complete module of a stage, and the modules of which it has a part."""
    text = whole[0] if len(whole) == 1 else f"{whole[0]} to {whole[-1]}" if whole else ""
    parts = ", ".join(name for name in parts_of if name != ".")
    return f"{text}{f' (part of {parts})' if parts else ''}".strip()


def format_adapted(result: MergedAdapters | AdapterInputs) -> str:
    """What became of adapters, a line for each file."""
    parts = [plural(result.pairs, "low-rank pair")]
    lines = []
    if isinstance(result.whole, int):
        parts += [plural(result.whole, "whole tensor")] if result.whole else []
        changed = f"merged into {plural(result.initializers, 'initializer')}"
        if result.untied:
            lines.append(f"no longer tied: {', '.join(result.untied)}")
    else:
        changed = f"taken as {plural(len(result.inputs), 'optional input')}, {plural(result.nodes, 'node')} added"
        if result.whole:
            parts.append(f"{plural(len(result.whole), 'whole initializer')} ({first_few(result.whole, 3)})")
        lines += [format_adapter_file(file) for file in result.adapters]
    if result.unused:
        lines.append(f"not used in the file: {first_few(result.unused, 3)}")
    return "\n".join([f"{result.path}: {' and '.join(parts)} {changed}", *lines])


def format_adapter_file(file: AdapterFile) -> str:
    return f"{file.path}: {plural(file.inputs, 'input')}, {bytes_text(file.bytes)}"


def adopted_document(adopted: Adopted) -> dict[str, Any]:
    """The document that ``modelexport adopt --json`` prints."""
    return {
        "path": str(adopted.path),
        "files": adopted.files,
        "coverage": adopted.coverage,
        "sources": adopted.sources,
        "repeated": adopted.repeated,
        "tree": adopted.tree,
    }

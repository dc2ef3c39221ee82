"""The text of `split`, `replace` and `place`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from modelexport.core.text import align, first_few, plural

if TYPE_CHECKING:
    from modelexport.surgery.adapting import AdapterFile, AdapterInputs, MergedAdapters
    from modelexport.surgery.placing import Placement
    from modelexport.surgery.replacing import Replaced
    from modelexport.surgery.splitting import Split
    from modelexport.traces.differences import Difference


def format_split(result: Split) -> str:
    """The stages, one on each line, and their balance."""
    rows: list[tuple[object, ...]] = [("STAGE", "WEIGHTS", result.by.upper(), "NODES", "IN", "OUT", "MODULES")]
    for one in result.stages:
        sizes = megabytes(one.bytes), f"{one.share:.1%}", one.nodes, len(one.inputs), len(one.outputs)
        rows.append((one.file, *sizes, _modules(one.modules, one.parts_of)))
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
        f"{one.name}: {one.status}"
        + (f", {one.absolute:.1e}" if one.absolute is not None else "")
        + (f" ({one.reason})" if one.reason else "")
        for one in differences
    )


def format_replaced(result: Replaced) -> str:
    """The calls that were replaced, one on each line."""
    rows: list[tuple[object, ...]] = [("CALL", "REMOVED", "ADDED", "INPUTS", "OUTPUTS")]
    rows += [(one.call, one.removed, one.added, ", ".join(one.inputs), ", ".join(one.outputs)) for one in result.calls]
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


_STATES = {"torn": "split", "elsewhere": "elsewhere", "no provider": "no provider available"}


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


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count:,} B"


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
    return f"{file.path}: {plural(file.inputs, 'input')}, {megabytes(file.bytes)}"

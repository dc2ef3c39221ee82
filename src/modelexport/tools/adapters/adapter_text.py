"""What became of adapters, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelexport.core.text import bytes_text, first_few, plural

if TYPE_CHECKING:
    from modelexport.tools.adapters.lora_adapters import AdapterFile, AdapterInputs, MergedAdapters


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

"""The text of ``modelexport internals``: the module map, the quality of its names, and the records at each stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelexport.core.text import align, indent, plural

if TYPE_CHECKING:
    from modelexport.capture.internals.internals_report import Internals


def format_internals(internals: Internals) -> str:
    """The map from module to scope name, the quality of names, and the stages of each exporter."""
    parts = []
    if internals.module_map:
        rows = [("MODULE", "SCOPE")]
        for entry in internals.module_map:
            above, _, last = entry.path.rpartition(".")
            depth = above.count(".") + 2 if above else int(bool(entry.path))
            rows.append((indent(depth, last or "."), entry.scope or "not in the map"))
        parts.append(align(rows))
        quality = (("module map", internals.map_quality), ("captured nodes", internals.scope_quality))
        head = ("SCOPE NAMES OF", "PLAIN", "CLASS", "HIERARCHY", "NONE", "DIFFERENT")
        counts = (
            (name, one.plain, one.class_scopes, one.full_hierarchies, one.none, one.different) for name, one in quality
        )
        parts.append(align([head, *counts]))
    stages = [(front_end.name, stage) for front_end in internals.front_ends for stage in front_end.stages]
    table = ((name, one.name, one.graph, one.nodes, one.located, one.calls, one.bytes) for name, one in stages)
    parts.append(align([("EXPORTER", "STAGE", "GRAPH", "NODES", "LOCATED", "CALLS", "BYTES"), *table]))
    records = (
        (name, stage.name, key, facts.nodes, facts.bytes)
        for name, stage in stages
        for key, facts in stage.keys.items()
        if facts.bytes is not None
    )
    parts.append(align([("EXPORTER", "STAGE", "RECORD", "NODES", "BYTES"), *records], right={3, 4}))
    parts += [f"{one.name} failed: {one.error}" for one in internals.front_ends if one.error]
    called = f"{internals.modules_called:,} of {plural(internals.modules, 'module')}"
    parts.append(f"one run makes {plural(internals.calls, 'call')} of {called}, the root included")
    return "\n\n".join(parts)

"""The text of ``modelexport internals``: the module map, the quality of its names, and the records at each stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelexport.core.text import align, indent, plural

if TYPE_CHECKING:
    from modelexport.capture.internals.facts import Internals, Quality


def format_internals(internals: Internals) -> str:
    """The map from module to scope name, the quality of names, and the stages of each exporter."""
    parts = []
    if internals.module_map:
        rows = [("MODULE", "SCOPE")]
        for entry in internals.module_map:
            above, _, own = entry.path.rpartition(".")
            depth = above.count(".") + 2 if above else int(bool(entry.path))
            rows.append((indent(depth, own or "."), entry.scope or "not in the map"))
        parts.append(align(rows))
        quality = (("module map", internals.map_quality), ("captured nodes", internals.scope_quality))
        head = ("SCOPE NAMES OF", "PLAIN", "CLASS", "HIERARCHY", "NONE", "DIFFERENT")
        parts.append(align([head, *(_quality_cells(*one) for one in quality)], right={1, 2, 3, 4, 5}))
    table = [("EXPORTER", "STAGE", "GRAPH", "NODES", "LOCATED", "CALLS", "BYTES")]
    table += [
        (
            front_end.name,
            stage.name,
            stage.graph,
            f"{stage.nodes:,}",
            f"{stage.located:,}",
            f"{stage.calls:,}",
            f"{stage.bytes:,}",
        )
        for front_end in internals.front_ends
        for stage in front_end.stages
    ]
    parts.append(align(table, right={3, 4, 5, 6}))
    records = [("EXPORTER", "STAGE", "RECORD", "NODES", "BYTES")]
    records += [
        (front_end.name, stage.name, key, f"{facts.nodes:,}", f"{facts.bytes:,}")
        for front_end in internals.front_ends
        for stage in front_end.stages
        for key, facts in stage.keys.items()
        if facts.bytes is not None
    ]
    parts.append(align(records, right={3, 4}))
    parts += [f"{one.name} failed: {one.error}" for one in internals.front_ends if one.error]
    called = f"{internals.modules_called:,} of {plural(internals.modules, 'module')}"
    parts.append(f"one run makes {plural(internals.calls, 'call')} of {called}, the root included")
    return "\n\n".join(parts)


def _quality_cells(name: str, quality: Quality) -> tuple[str, ...]:
    counts = (quality.plain, quality.class_scopes, quality.full_hierarchies, quality.none, quality.different)
    return (name, *(f"{count:,}" for count in counts))

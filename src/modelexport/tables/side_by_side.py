"""Two runs of one model in one table: of two files, or of a file and of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from modelexport.core.calls import ROOT, ModuleCall
from modelexport.tables import columns
from modelexport.tables.columns import AGAINST, RATIO, Column, Figure, Kind
from modelexport.tables.profiles import ModuleProfile, RunFacts, noise_note
from modelexport.tables.table import OUTSIDE, NodeFigures, Table
from modelexport.tables.turns import Turns, turns_line

AGAINST_SIZES = (
    Column("against_bytes", "bytes"),
    Column("against_bits", "bits", hidden=True),
    Column("against_held", "elements", hidden=True),
    Column("against_precision", columns.PRECISION.unit, Kind.RATIO, of=("against_bits", "against_held")),
)


def profile_against(first: ModuleProfile, second: ModuleProfile) -> ModuleProfile:
    """Two profiles side by side: ``against_seconds`` of the other, and how many times the first's those are.

    A note says how long the second file takes beside the first if they ran in turns.

    A call that only the other file has is counted for the innermost call around it that both have.
    """
    added = [
        replace(
            node,
            calls=tuple(dict.fromkeys(_nearest_common_call(call, first.table, second.table) for call in node.calls)),
            figures={AGAINST.name: node.figures["seconds"]},
            runs=(),
            place=("", ""),
        )
        for node in second.table.nodes
    ]
    names = Path(first.facts.file).name, Path(second.facts.file).name
    note = turns_line(second.turns, *names) if second.turns is not None else _against_line(second.facts)
    return _beside(first, added, {}, second.facts, note, second.turns)


def cost_against(first: Table, second: Table) -> Table:
    """A cost beside that of another file: ``against_bytes`` and ``against_precision`` of the other."""
    sums = [columns.BYTES, columns.BITS, columns.HELD]
    direct: dict[str, dict[ModuleCall, Figure]] = {}
    for column in sums:
        figures_of = direct.setdefault(f"against_{column.name}", {})
        for call, figure in second.own[column.name].items():
            known = _nearest_common_call(call, first, second)
            figures_of[known] = figures_of.get(known, 0) + figure
    outside = {f"against_{column.name}": second.outside.get(column.name, 0) for column in sums}
    return replace(
        first,
        columns=(*first.columns, *AGAINST_SIZES),
        nodes=(*first.nodes, NodeFigures(OUTSIDE, "Initializer", (), outside)),
        direct={**first.direct, **direct},
    )


def _nearest_common_call(call: ModuleCall, first: Table, second: Table) -> ModuleCall:
    """A call of another file, or the innermost call around it, that the first file has too."""
    return next((above for above in reversed(second.calls.stack(call)) if above in first.calls), ROOT)


def profile_beside(profile: ModuleProfile, seconds: Mapping[ModuleCall, int]) -> ModuleProfile:
    """A profile beside the nanoseconds that the calls themselves took in PyTorch."""
    known_seconds = {call: taken for call, taken in seconds.items() if call in profile.table.calls}
    rest = sum(seconds.values()) - sum(known_seconds.values())
    added = [NodeFigures("(PyTorch)", "", (), {AGAINST.name: rest})] if rest else []
    whole = sum(seconds.values()) / 1e9
    facts = msgspec.structs.replace(
        profile.facts, file="PyTorch", wall_seconds=whole, profiled_seconds=whole, spread_seconds=0.0
    )
    return _beside(profile, added, {AGAINST.name: known_seconds}, facts, _against_line(facts))


def _against_line(facts: RunFacts) -> str:
    return f"against: {facts.file}, {facts.wall_seconds * 1e3:,.3g} ms a run"


def _beside(
    profile: ModuleProfile,
    added: Sequence[NodeFigures],
    direct: Mapping[str, Mapping[ModuleCall, int]],
    facts: RunFacts,
    note: str,
    turns: Turns | None = None,
) -> ModuleProfile:
    first, *more = profile.table.columns
    table = replace(
        profile.table,
        columns=(first, AGAINST, RATIO, *more),
        nodes=(*profile.table.nodes, *added),
        direct={**profile.table.direct, **direct},
        notes=(note, *noise_note(facts), *profile.table.notes),
    )
    return ModuleProfile(table, profile.facts, profile.feeds, facts, turns)

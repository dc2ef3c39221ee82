"""The call tree with the nodes of each call, as ``modelexport tree`` and a ``TaggedModel`` show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from modelexport.core.calls import CallTree, ModuleCall
from modelexport.core.text import align, indent, plural, shortened
from modelexport.format.documents import Coverage

Owned = Iterable[tuple[ModuleCall | None, str]]
"""Nodes: the call that produces a node's output, if known, and its operator."""


class TreeRow(msgspec.Struct, frozen=True):
    """One call and its nodes. A node with several owners counts once, for the call that produces its output."""

    address: str
    tag: str
    parent: str | None
    depth: int
    nodes: int
    """The number of nodes of the call and of the calls inside it."""
    own: dict[str, int]
    """Its own nodes: operator to count."""


def tree_rows(nodes: Owned, calls: CallTree, tag: Callable[[ModuleCall], str]) -> list[TreeRow]:
    """Every call, in the order in which they began: callers before callees."""
    operators_of: dict[ModuleCall, Counter[str]] = {traced.call: Counter() for traced in calls}
    for call, operator in nodes:
        if call is not None:
            operators_of[call][operator] += 1
    totals = {call: operators.total() for call, operators in operators_of.items()}
    for traced in reversed(calls.calls):
        if traced.parent is not None:
            totals[traced.parent] += totals[traced.call]
    return [
        TreeRow(
            traced.call.address,
            tag(traced.call),
            None if traced.parent is None else traced.parent.address,
            traced.depth,
            totals[traced.call],
            dict(sorted(operators_of[traced.call].items())),
        )
        for traced in calls
    ]


def untagged_operators(nodes: Owned) -> dict[str, int]:
    """The nodes without an owner, which an adopted file may have: operator to count."""
    return dict(sorted(Counter(operator for call, operator in nodes if call is None).items()))


def format_tree(rows: Sequence[TreeRow], coverage: Coverage, untagged: Mapping[str, int] | None = None) -> str:
    """A table of the calls with the number of their nodes and the operators of their own nodes; last, unowned nodes."""
    table: list[tuple[object, ...]] = [("MODULE", "CALL", "NODES", "OWN OPERATORS")]
    for row in rows:
        if row.nodes:
            segment = row.tag.rpartition("/")[2]
            table.append((indent(row.depth, segment), row.address or ".", row.nodes, _operators(row.own)))
    if untagged:
        table.append(("(no module known)", "", sum(untagged.values()), _operators(untagged)))
    empty = sum(not row.nodes for row in rows)
    without = f"; {plural(empty, 'call')} without nodes not shown" if empty else ""
    return f"{align(table)}\n\n{format_coverage(coverage)}{without}"


def format_coverage(coverage: Coverage) -> str:
    """How many nodes have an owner by each kind of evidence."""
    counts = (f"{getattr(coverage, name):,} {name}" for name in coverage.__struct_fields__)
    return f"nodes: {', '.join(counts)}"


def _operators(counts: Mapping[str, int]) -> str:
    listed = ", ".join(f"{operator} {count}" if count > 1 else operator for operator, count in counts.items())
    return shortened(listed, 60)

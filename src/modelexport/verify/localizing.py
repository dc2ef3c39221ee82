"""Which nodes made a value wrong, where several calls compute between two values that PyTorch has.

A node is acquitted if it also leads to a value that is right, or if what it gives is what an operation of PyTorch gave,
more closely than the error is large. What is left is blamed, in the order of the graph: the first of it got nothing
wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.graph.owners import owner_of
from modelexport.runtime import sessions
from modelexport.runtime.evidence import Evidence
from modelexport.runtime.fingerprints import NEAR, Index, fingerprint_of
from modelexport.surgery.repeating import values_taken
from modelexport.verify.differences import Difference
from modelexport.verify.matching import FileRun
from modelexport.verify.segments import GIVEN, segmented

_LEAST = 3e-7
"""Closer than this, fingerprints of float32 numbers are not told apart."""
_EQUAL = 1e-6
"""Up to here, fingerprints are of the same numbers."""
_SHARE = 16.0
"""How much closer than the error a value has to be to PyTorch's to be right."""


@dataclass(frozen=True)
class Suspects:
    """The nodes that may have made a value wrong."""

    value: str
    nodes: Sequence[ir.Node]
    """In the order of the graph."""

    @property
    def calls(self) -> Sequence[ModuleCall]:
        """Their owners, in that order."""
        owners = (owner_of(node) for node in self.nodes)
        return list(dict.fromkeys(owner.call for owner in owners if owner is not None))


def nodes_between(node: ir.Node, boundaries: Collection[str]) -> dict[ir.Node, None]:
    """The nodes that compute between ``boundaries`` and what a node gives, itself included."""
    found = {node: None}
    pending = [node]
    while pending:
        current = pending.pop()
        for value in values_taken(current):
            producer = value.producer() if value.name not in boundaries else None
            if producer is not None and producer not in found:
                found[producer] = None
                pending.append(producer)
    return found


def taken_by(nodes: Iterable[ir.Node], boundaries: Collection[str]) -> set[str]:
    """The boundaries that nodes take."""
    return {name for node in nodes for value in values_taken(node) if (name := value.name or "") in boundaries}


def find_suspects(
    model: ir.Model,
    folder: Path,
    made: Mapping[str, ir.Node],
    compared: Mapping[str, Difference],
    boundaries: Mapping[str, str],
    inputs: Mapping[str, Any],
    run: FileRun,
    evidence: Evidence,
    *,
    provider: str,
) -> dict[str, Suspects]:
    """The suspects of each value that differs.

    Args:
        made: Name of a value to its node.
        compared: Values computed from the right ones before them.
        boundaries: Where the file was cut for that.
        inputs: Those of the file, and PyTorch's values under the names that they are given by.
        run: The file end to end.

    Raises:
        UsageError: ONNX Runtime does not run the file.
    """
    wrong = {name: nodes_between(made[name], boundaries) for name, one in compared.items() if one.status == "differ"}
    if not wrong:
        return {}
    order = {node: index for index, node in enumerate(model.graph)}
    right: set[ir.Node] = set()
    for name, one in compared.items():
        if one.status == "agree":
            right.update(nodes_between(made[name], boundaries))
    known = _known(model, folder, wrong, boundaries, inputs, compared, run, evidence, provider)
    found = {}
    for name, nodes in wrong.items():
        own = set(nodes) - right - known[name]
        found[name] = Suspects(name, sorted(own or nodes, key=lambda node: order.get(node, 0)))
    return found


def _known(
    model: ir.Model,
    folder: Path,
    wrong: Mapping[str, Collection[ir.Node]],
    boundaries: Mapping[str, str],
    inputs: Mapping[str, Any],
    compared: Mapping[str, Difference],
    run: FileRun,
    evidence: Evidence,
    provider: str,
) -> dict[str, set[ir.Node]]:
    """For each wrong value the nodes before it that compute what PyTorch's operations do, with all before them."""
    names = {
        value.name or "": node
        for nodes in wrong.values()
        for node in nodes
        for value in node.outputs
        if value.name and value.name not in wrong and not isinstance(value.type, ir.SequenceType | ir.OptionalType)
    }
    found: dict[str, set[ir.Node]] = {name: set() for name in wrong}
    if not evidence.computed or not names:
        return found
    index: Index[Any] = Index()
    for operation in evidence.computed:
        index.add(operation.fingerprint, operation.fingerprint)
    cut = segmented(model, boundaries, list(names), {n.removesuffix(GIVEN): a.dtype for n, a in inputs.items()})
    session = sessions.open_session(cut, folder=folder, provider=provider)
    arrays = sessions.run_session(session, {name: inputs[name] for name in sessions.input_names(session)})
    copies = copied_values(model, run)
    for name, nodes in wrong.items():
        relative = compared[name].relative
        apart = NEAR if relative is None else min(NEAR, relative / _SHARE)
        if apart < _LEAST:
            continue
        for value in (v.name or "" for node in nodes for v in node.outputs if (v.name or "") in arrays):
            own = fingerprint_of(arrays[value])
            if own.telling and value not in copies and any(own.near(other, apart) for other in index.near(own)):
                found[name].update(nodes_between(names[value], boundaries))
    return found


def copied_values(model: ir.Model, run: FileRun) -> set[str]:
    """Values with the numbers of an earlier one, which no mere move of elements makes of it.

    Taken from the wrong place, a value is PyTorch's all the same.
    """
    first: Index[str] = Index()
    found: set[str] = set()
    for node in model.graph:
        given = [value for value in values_taken(node) if not value.is_initializer()]
        moved = {value.name or "" for value in given} if len(given) == 1 else set()
        for value in node.outputs:
            name = value.name or ""
            own = run.prints.get(name)
            if own is None or not own.telling:
                continue
            earlier = {one for one in first.near(own) if run.prints[one].near(own, _EQUAL)}
            if earlier and (moved & found or not moved & earlier):
                found.add(name)
            first.add(own, name)
    return found

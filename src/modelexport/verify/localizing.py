"""Which nodes made a value wrong, where several calls compute between two values that PyTorch has.

A node is acquitted if it also leads to a value that is right, or if what it gives is what an operation of PyTorch gave
in its call, more closely than the error is large. What is left is blamed, in the order of the graph: the first of it
got nothing wrong. A right value acquits only what it depends on: a mask may leave nothing of what leads to it. One in
another layout acquits nothing: it has that layout from the nodes before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.graph.nodes import nested_graphs
from modelexport.graph.owners import owner_of
from modelexport.runtime import sessions
from modelexport.runtime.evidence import Evidence
from modelexport.runtime.fingerprints import NEAR, Index, fingerprint_of, is_floating
from modelexport.surgery.repeating import values_taken
from modelexport.verify.differences import Difference
from modelexport.verify.leading import MOVES
from modelexport.verify.matching import FileRun
from modelexport.verify.segments import GIVEN, given_name, nodes_before, segmented

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
    laid: Collection[str] = (),
) -> dict[str, Suspects]:
    """The suspects of each value that differs.

    Args:
        made: Name of a value to its node.
        compared: Values computed from the right ones before them.
        boundaries: Where the file was cut for that.
        inputs: Those of the file, and PyTorch's values under the names that they are given by.
        run: The file end to end.
        laid: The values that are compared in another layout than PyTorch's.

    Raises:
        UsageError: ONNX Runtime does not run the file.
    """
    wrong = {name: nodes_before([made[name]], boundaries) for name, one in compared.items() if one.status == "differ"}
    if not wrong:
        return {}
    order = {node: index for index, node in enumerate(model.graph)}
    agreeing = [name for name, one in compared.items() if one.status == "agree" and name not in laid]
    segments = _Segments(model, folder, boundaries, inputs, provider)
    arrays = segments.run(_names_within(wrong))
    known = _known(wrong, boundaries, compared, run, evidence, model, inputs, arrays)
    right = {node for name in agreeing for node in nodes_before([made[name]], boundaries)}
    entering = {
        value
        for name, nodes in wrong.items()
        for value in taken_by(set(nodes) - right - known[name], arrays)
        if made[value] in right
    }
    if entering:
        ends = [*boundaries, *segments.without_effect(sorted(entering), arrays, made, agreeing, list(wrong))]
        right = {node for name in agreeing for node in nodes_before([made[name]], ends)}
    found = {}
    for name, nodes in wrong.items():
        own = set(nodes) - right - known[name]
        own = {node for node in own if not _gives_sizes(node)} or own or set(nodes)
        found[name] = Suspects(name, sorted(own, key=lambda node: order.get(node, 0)))
    return found


def _gives_sizes(node: ir.Node) -> bool:
    """Whether a node gives sizes of a tensor: wrong ones would make other shapes, and no other numbers."""
    pending, seen = [node], set[ir.Node]()
    while pending:
        current = pending.pop()
        if current.domain != "" or current.op_type not in _OF_SIZES or current in seen:
            return False
        seen.add(current)
        if current.op_type != "Shape":
            taken = [value for value in current.inputs if value is not None and not value.is_initializer()]
            pending.extend(producer for value in taken if (producer := value.producer()) is not None)
            if not taken or any(value.producer() is None for value in taken):
                return False
    return True


_OF_SIZES = frozenset({"Cast", "Gather", "Shape", "Slice", "Squeeze", "Unsqueeze"})


def _names_within(wrong: Mapping[str, Collection[ir.Node]]) -> list[str]:
    """The values of the nodes that compute what is wrong, but for that itself."""
    values = (value for nodes in wrong.values() for node in nodes for value in node.outputs)
    names = (v.name for v in values if not isinstance(v.type, ir.SequenceType | ir.OptionalType))
    return list(dict.fromkeys(name for name in names if name and name not in wrong))


@dataclass(frozen=True)
class _Segments:
    """A file that is cut at values that PyTorch has, and gets these."""

    model: ir.Model
    folder: Path
    boundaries: Mapping[str, str]
    inputs: Mapping[str, Any]
    provider: str

    def run(self, names: Sequence[str], given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Values of the file, computed from the right ones and some others."""
        if not names:
            return {}
        others = given or {}
        inputs = {**self.inputs, **{given_name(name): array for name, array in others.items()}}
        types = {name.removesuffix(GIVEN): array.dtype for name, array in inputs.items()}
        cut = segmented(self.model, dict.fromkeys([*self.boundaries, *others]), list(names), types)
        session = sessions.open_session(cut, folder=self.folder, provider=self.provider)
        return sessions.run_session(session, {name: inputs[name] for name in sessions.input_names(session)})

    def without_effect(
        self,
        names: Sequence[str],
        arrays: Mapping[str, Any],
        made: Mapping[str, ir.Node],
        agreeing: Sequence[str],
        wrong: Sequence[str],
    ) -> list[str]:
        """Those of some values that may be other numbers without any change to what is right after them.

        What changes nothing that is wrong either is not among them: it did not make that wrong.

        Args:
            arrays: What they are.
        """
        found = []
        before = {one: nodes_before([made[one]], self.boundaries) for one in (*agreeing, *wrong)}
        for name in [name for name in names if is_floating(arrays[name])][:_TRIALS]:
            after = [one for one, nodes in before.items() if made[name] in nodes]
            right = arrays[name]
            # A softmax hides what is added to all, and twice what a mask adds may be larger than any number.
            noise = np.random.default_rng(right.size).standard_normal(right.shape).astype(right.dtype)
            one, other = (self.run(after, {name: array}) for array in (right, right / 2 + noise))
            changed = {
                key for key in after if not np.array_equal(one[key], other[key], equal_nan=is_floating(one[key]))
            }
            if changed and changed.isdisjoint(agreeing):
                found.append(name)
        return found


_TRIALS = 12
"""For how many values it is tried whether they have an effect: each is two runs."""


def _known(
    wrong: Mapping[str, Collection[ir.Node]],
    boundaries: Mapping[str, str],
    compared: Mapping[str, Difference],
    run: FileRun,
    evidence: Evidence,
    model: ir.Model,
    inputs: Mapping[str, Any],
    arrays: Mapping[str, Any],
) -> dict[str, set[ir.Node]]:
    """For each wrong value the nodes before it that compute what PyTorch's operations do, with all before them.

    Args:
        arrays: What these nodes compute from the right values.
    """
    found: dict[str, set[ir.Node]] = {name: set() for name in wrong}
    if not evidence.computed or not arrays:
        return found
    made = {value.name or "": node for node in model.graph for value in node.outputs}
    index: Index[Any] = Index()
    for operation in evidence.computed:
        index.add(operation.fingerprint, operation)
    copies = copied_values(model, run, inputs)
    for name, nodes in wrong.items():
        relative = compared[name].relative
        apart = NEAR if relative is None else min(NEAR, relative / _SHARE)
        if apart < _LEAST:
            continue
        for node in nodes:
            for value in (v.name or "" for v in node.outputs if (v.name or "") in arrays):
                if value in copies and not _is_apart(node, copies[value], made):
                    continue
                own = fingerprint_of(arrays[value])
                alike = list(index.near(own, apart)) if own.telling else []
                alike = [one for one in alike if one.new or value not in copies]
                if _is_of(node, {one.call for one in alike}):
                    found[name].update(nodes_before([node], boundaries))
    return found


def _is_of(node: ir.Node, calls: set[ModuleCall]) -> bool:
    """Whether a node may be what PyTorch computed in some calls: what is wrong in one may be right in another."""
    owner = owner_of(node)
    if owner is None or (node.domain == "" and node.op_type in MOVES):
        return bool(calls)
    return not calls.isdisjoint(owner.calls)


def _is_apart(node: ir.Node, earlier: Collection[str], made: Mapping[str, ir.Node]) -> bool:
    """Whether none of some values was made in a call of this node: a call may compute what another one did before."""
    own = owner_of(node)
    others = [owner_of(made[name]) if name in made else None for name in earlier]
    return own is not None and all(one is not None and set(own.calls).isdisjoint(one.calls) for one in others)


def _is_left(node: ir.Node, run: FileRun) -> bool:
    """Whether a node that orders or chooses elements gives all of them as it got them, as its values show."""
    taken, given = node.inputs[0] if node.inputs else None, node.outputs[0]
    if node.domain != "" or node.op_type not in _ORDERING or taken is None:
        return False
    one, other = (run.prints.get(value.name or "") for value in (taken, given))
    shapes = run.shapes.get(taken.name or ""), run.shapes.get(given.name or "")
    return one is not None and other is not None and one.near(other, _EQUAL) and shapes[0] == shapes[1]


_ORDERING = frozenset({"Gather", "GatherElements", "GatherND", "Slice", "Transpose"})


def copied_values(model: ir.Model, run: FileRun, inputs: Mapping[str, Any]) -> dict[str, set[str]]:
    """Values with the numbers of earlier ones, to these, where no mere move of elements makes it of them.

    Taken from the wrong place, a value is PyTorch's all the same; so is a sum with what is zero by a fault, and what a
    node leaves in its order that should give it another one.

    Args:
        inputs: Those of the file.
    """
    first: Index[str] = Index()
    found: dict[str, set[str]] = {}
    known = dict(run.prints)
    for value in model.graph.inputs:
        if (name := value.name or "") in inputs:
            known[name] = fingerprint_of(inputs[name])
            first.add(known[name], name)
    for node in model.graph:
        given = [value for value in values_taken(node) if not value.is_initializer()]
        passes_on = len(given) == 1 or bool(nested_graphs(node))  # a condition chooses
        moved = {value.name or "" for value in given} if passes_on else set()
        for value in node.outputs:
            name = value.name or ""
            own = known.get(name)
            if own is None or not own.telling:
                continue
            earlier = set(first.near(own, _EQUAL))
            if earlier and (moved & found.keys() or not moved & earlier or _is_left(node, run)):
                found[name] = earlier
            first.add(own, name)
    return found

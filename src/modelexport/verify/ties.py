"""Ties: where a file takes others of equal scores than PyTorch did, PyTorch's choice is fed on to what follows.

Which integers of a file are choices is told by their numbers: in the scores that their node gets, they are where the
largest or the smallest are. They are paired with PyTorch's by their call and their sizes, in order; that they are the
same ones is proven afterwards, by the scores.

What is chosen from is compared as any other value where it is near PyTorch's: integers say nothing of numbers that are
a little off, until they are another choice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.graph.owners import owner_of
from modelexport.runtime import sessions
from modelexport.runtime.choices import Choice, choose_alike, chosen_axis, is_tie
from modelexport.runtime.evidence import Evidence
from modelexport.runtime.fingerprints import Index, fingerprint_of
from modelexport.verify.differences import UNITS, UNMEASURED_UNITS, Difference
from modelexport.verify.matching import WHOLE_UNITS, distance
from modelexport.verify.segments import given_name, segmented


@dataclass(frozen=True)
class FileChoice:
    """A choice of the PyTorch run and the values of the main graph that make it in the file."""

    choice: Choice
    scores: str
    indices: str

    def is_tie(self, evidence: Evidence, scores: Any, found: Any) -> bool:
        """Whether the file's choice, from its scores, is as good as PyTorch's."""
        right = evidence.array(self.choice.indices).reshape(self.choice.indices_shape)
        right_scores = evidence.array(self.choice.scores).reshape(self.choice.scores_shape)
        if scores.size != right_scores.size or found.size != right.size:
            return False
        # Scores that are wrong choose others, too: only those that are off by rounding can be tied.
        unit = UNITS.get(str(scores.dtype), 0.0)
        if not distance(right_scores, scores) <= max(WHOLE_UNITS * UNITS["float32"], UNMEASURED_UNITS * unit):
            return False
        return is_tie(right_scores, scores.reshape(right_scores.shape), right, found.reshape(right.shape))


def find_choices(
    model: ir.Model,
    folder: Path,
    feeds: Mapping[str, Any],
    evidence: Evidence,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    provider: str,
) -> tuple[list[FileChoice], dict[str, Any]]:
    """Pair the choices of a PyTorch run with values of a file.

    Args:
        shapes: Of the values of the main graph, in a run with these feeds.

    Returns:
        The pairs, and what the indices and the scores are in a run of the file.

    Raises:
        UsageError: ONNX Runtime does not run the file.
    """
    if not evidence.choices:
        return [], {}
    sizes = {(prod(c.indices_shape), prod(c.scores_shape)) for c in evidence.choices}
    nodes = list(_candidates(model, shapes, feeds, sizes))
    if not nodes:
        return [], {}
    made = {value.name: value for node in model.graph for value in node.outputs}
    names = dict.fromkeys(name for _, *pair in nodes for name in pair if name in made)
    whole = sessions.with_outputs(model, [made[name] for name in names])
    session = sessions.open_session(whole, folder=folder, provider=provider)
    arrays = sessions.run_session(session, {name: feeds[name] for name in sessions.input_names(session)})
    arrays.update({name: feeds[name] for _, name, _ in nodes if name in feeds})
    proven = [one for one in nodes if _is_choice(arrays[one[1]], arrays[one[2]])]
    return _paired(evidence.choices, proven, arrays), arrays


def _is_choice(scores: Any, indices: Any) -> bool:
    return chosen_axis(scores, indices) is not None or chosen_axis(scores, np.squeeze(indices)) is not None


def _candidates(
    model: ir.Model, shapes: Mapping[str, tuple[int, ...]], feeds: Mapping[str, Any], sizes: set[tuple[int, int]]
) -> Iterator[tuple[ir.Node, str, str]]:
    """Nodes that make integers of numbers, of the sizes of a choice: node, scores, indices."""
    known = {**{name: array.shape for name, array in feeds.items()}, **shapes}
    for node in model.graph:
        for value in node.outputs:
            if value.dtype is not ir.DataType.INT64 or (value.name or "") not in shapes:
                continue
            for taken in node.inputs:
                if taken is None or taken.dtype is None or not taken.dtype.is_floating_point():
                    continue
                scores, indices = taken.name or "", value.name or ""
                if scores in known and (prod(known[indices]), prod(known[scores])) in sizes:
                    yield node, scores, indices


def _paired(
    choices: Sequence[Choice], nodes: Sequence[tuple[ir.Node, str, str]], arrays: Mapping[str, Any]
) -> list[FileChoice]:
    """In order: those of one call and size first, then those of one size, wherever there are as many on both sides."""
    found: list[FileChoice] = []
    choices, nodes = list(choices), list(nodes)
    for by_call in (True, False):
        here: dict[Any, list[tuple[ir.Node, str, str]]] = defaultdict(list)
        there: dict[Any, list[Choice]] = defaultdict(list)
        for one in nodes:
            owner = owner_of(one[0])
            call = owner.call if owner is not None and by_call else None
            here[call, arrays[one[2]].size, arrays[one[1]].size].append(one)
        for choice in choices:
            call = choice.call if by_call else None
            there[call, prod(choice.indices_shape), prod(choice.scores_shape)].append(choice)
        for key, those in there.items():
            if len(those) == len(here[key]):
                found += [FileChoice(c, one[1], one[2]) for c, one in zip(those, here[key], strict=True)]
        taken = {pair.indices for pair in found}
        made = {pair.choice for pair in found}
        nodes = [one for one in nodes if one[2] not in taken]
        choices = [choice for choice in choices if choice not in made]
    return found


def scores_of(
    pairs: Collection[FileChoice], arrays: Mapping[str, Any], evidence: Evidence, known: Collection[str]
) -> dict[str, FileChoice]:
    """The values that the file chooses from and that are, or should be, what PyTorch chose from, to their choices.

    A file may choose from other numbers: scores with the sign changed, on another scale, or in another layout. Only
    what is near PyTorch's as a whole is taken for them. Of several choices that PyTorch made from as many scores, it is
    the one with these numbers, whatever the order.

    Args:
        known: Values that are known already.
    """
    index: Index[Choice] = Index()
    for choice in dict.fromkeys(pair.choice for pair in pairs):
        index.add(fingerprint_of(evidence.array(choice.scores)), choice)
    found: dict[str, FileChoice] = {}
    for pair in pairs:
        array = arrays[pair.scores]
        if pair.scores in known or pair.scores in found:
            continue
        errors = {one: distance(evidence.array(one.scores), array) for one in index.near(fingerprint_of(array))}
        best = min(errors, key=lambda one: errors[one], default=pair.choice)
        is_best = best in errors and errors[best] <= WHOLE_UNITS * UNITS.get(str(array.dtype), 0.0)
        its = best if is_best else pair.choice
        if distance(evidence.array(its.scores), array) < _NEAR_SCORES:
            found[pair.scores] = replace(pair, choice=its)
    return found


_NEAR_SCORES = 0.3
"""What scores may be off by, in norms, to be taken for wrong ones of PyTorch's, and not for other numbers."""


def chooses_alike(pair: FileChoice, evidence: Evidence, scores: Any) -> bool:
    """Whether the file's scores differ from PyTorch's by nothing that changes a choice, but for rounding."""
    choice = pair.choice
    right = evidence.array(choice.scores).reshape(choice.scores_shape)
    chosen = evidence.array(choice.indices).reshape(choice.indices_shape)
    share = UNMEASURED_UNITS * UNITS.get(str(scores.dtype), 0.0)
    return scores.size == right.size and choose_alike(right, scores.reshape(right.shape), chosen, share)


def wrong_choices(pairs: Collection[FileChoice], arrays: Mapping[str, Any], evidence: Evidence) -> list[FileChoice]:
    """Those for which the file's indices are not PyTorch's."""
    return [p for p in pairs if not np.array_equal(arrays[p.indices].reshape(-1), evidence.array(p.choice.indices))]


def fed(pairs: Collection[FileChoice], arrays: Mapping[str, Any], evidence: Evidence) -> dict[str, Any]:
    """PyTorch's indices under the names of the file's."""
    return {p.indices: evidence.array(p.choice.indices).reshape(arrays[p.indices].shape) for p in pairs}


def outputs_with_choices(
    model: ir.Model,
    folder: Path,
    feeds: Mapping[str, Any],
    evidence: Evidence,
    *,
    provider: str,
) -> tuple[Mapping[str, Any], str]:
    """The outputs of a file that is given PyTorch's choices where its own are as good, and what was tied.

    Returns:
        Nothing where a choice is another and not as good, or none is another.

    Raises:
        UsageError: ONNX Runtime does not run the file.
    """
    values = [v for node in model.graph for v in node.outputs if v.name and v.dtype is not None]
    floats = [v for v in values if v.dtype is ir.DataType.INT64 or (v.dtype and v.dtype.is_floating_point())]
    if not evidence.choices:
        return {}, ""
    session = sessions.open_session(sessions.with_outputs(model, floats), folder=folder, provider=provider)
    whole = sessions.run_session(session, {name: feeds[name] for name in sessions.input_names(session)})
    shapes = {name: array.shape for name, array in whole.items()}
    pairs, arrays = find_choices(model, folder, feeds, evidence, shapes, provider=provider)
    wrong = wrong_choices(pairs, arrays, evidence)
    if not wrong:
        return {}, ""
    given = fed(pairs, arrays, evidence)
    outputs = [value.name or "" for value in model.graph.outputs]
    own = [name for p in pairs for name in (p.scores, p.indices) if name not in feeds]
    cut = segmented(model, given, list(dict.fromkeys([*(name for name in outputs if name not in feeds), *own])))
    session = sessions.open_session(cut, folder=folder, provider=provider)
    inputs = {**feeds, **{given_name(name): array for name, array in given.items()}}
    found = {**feeds, **sessions.run_session(session, {name: inputs[name] for name in sessions.input_names(session)})}
    tied = wrong_choices(pairs, found, evidence)
    if not all(p.is_tie(evidence, found[p.scores], found[p.indices]) for p in tied):
        return {}, ""
    # An output that is itself a choice is PyTorch's, as what follows it.
    return {name: given.get(name, found[name]) for name in outputs}, _told(wrong)


def _told(pairs: Sequence[FileChoice]) -> str:
    calls = list(dict.fromkeys(p.choice.call for p in pairs))
    more = " ..." if len(calls) > 3 else ""
    return f"chose others of equal scores in {', '.join(map(str, calls[:3]))}{more}: PyTorch's choice was fed on"


def as_tie(difference: Difference) -> Difference:
    """A difference that is none: others of equal scores."""
    reason = f"{difference.reason}, among equal scores: PyTorch's choice was fed on"
    return Difference(
        name=difference.name,
        status="tie",
        reason=reason,
        dtype=difference.dtype,
        shape=difference.shape,
        absolute=difference.absolute,
    )

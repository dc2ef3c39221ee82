"""What rounding does to PyTorch itself, and between which calls an error is made."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from modelexport.core.calls import ModuleCall, Side
from modelexport.graph.owners import owner_of
from modelexport.runtime.evidence import Evidence, SeenTensor
from modelexport.runtime.kernels import run_in_double
from modelexport.tagged.file import TaggedFile
from modelexport.verify.comparing import run_segments
from modelexport.verify.differences import (
    SHARES,
    UNITS,
    UNMEASURED_UNITS,
    Difference,
    compare_arrays,
    known_beside_noise,
)
from modelexport.verify.layouts import with_rows_of
from modelexport.verify.localizing import copied_values, taken_by
from modelexport.verify.matching import FileRun
from modelexport.verify.proof import Proof
from modelexport.verify.segments import nodes_before, segmented


def measure_noise(proof: Proof) -> None:
    """Where more differs than a few units, see what rounding does before anything is accused.

    First to the file: from the right values before them, values are computed with float64 kernels, which takes little
    where few differ. Then to PyTorch: its whole run is repeated in float64, or with other roundings if it does not run
    in float64.
    """
    precise = dict(_computed_in_double(proof, _numbers_that_differ(proof)))
    for name, array in precise.items():
        _acquit(proof, compare_arrays(name, proof.right(name), array, by_row=True))
    suspects = _numbers_that_differ(proof)
    if not suspects:
        return

    def rounded() -> dict[str, Any]:
        return _by_content(proof.evidence, proof.evidence.rounded_otherwise(proof.hints.values()), UNITS)

    exact = proof.evidence.in_float64(proof.hints.values())
    known = _by_content(proof.evidence, exact, ["float64"]) if exact is not None else rounded()

    def judged(name: str, array: Any) -> Difference:
        without = known.get(proof.hints[name])
        return compare_arrays(
            name,
            proof.right(name),
            array,
            exact=without.reshape(array.shape) if without is not None else None,
            by_row=True,
            **({} if without is not None else {"units": UNMEASURED_UNITS}),
        )

    def judge(names: Sequence[str]) -> None:
        for name in names:
            proof.per_module[name] = judged(name, proof.run.arrays[name])
            if proof.per_module[name].status == "differ" and name in precise:
                _acquit(proof, judged(name, precise[name]))

    judge(suspects)
    unmeasured = [name for name in suspects if proof.hints[name] not in known]
    if exact is not None and (doubtful := [name for name in suspects if proof.per_module[name].is_doubtful]):
        known = rounded()
        judge(doubtful)
    proof.per_module.update({name: known_beside_noise(proof.per_module[name]) for name in suspects})
    if _give_up_scores(proof, unmeasured):
        measure_noise(proof)


def _by_content(run: Evidence, again: Evidence | None, dtypes: Collection[str]) -> dict[str, Any]:
    """Each content of a run to what another run of the same calls has in its place, first.

    Args:
        dtypes: The types that the other run has to have.
    """
    found: dict[str, Any] = {}
    if again is None:
        return found
    for tensor, its in zip(run.tensors, again.tensors, strict=False):
        if its.dtype in dtypes and its.shape == tensor.shape:
            found.setdefault(tensor.content, again.array(its.content))
    alike = len(run.choices) == len(again.choices)
    for choice, other in zip(run.choices, again.choices, strict=True) if alike else ():
        if (choice.call, choice.scores_shape) == (other.call, other.scores_shape):
            scores = again.array(other.scores)
            if str(scores.dtype) in dtypes:
                found.setdefault(choice.scores, scores)
    return found


def _give_up_scores(proof: Proof, unmeasured: Collection[str]) -> bool:
    """Compare scores no longer whose rounding is not known, if they are off by no more than it may be.

    Distances are often differences of large numbers, of which rounding leaves little. What was computed from PyTorch's
    scores is computed from those before them, as if they had not been known.

    Returns:
        Whether there were any.
    """
    given_up = set[str]()
    for name in unmeasured:
        one = proof.per_module[name]
        if proof.is_scores(name) and one.status == "differ" and (one.relative or 0.0) <= SHARES[one.dtype]:
            given_up.add(name)
    if not given_up:
        return False
    before = {name: nodes_before([proof.nodes[name]], proof.hints) for name in proof.per_module if name not in given_up}
    after = [name for name, nodes in before.items() if not taken_by(nodes, proof.hints).isdisjoint(given_up)]
    for name in given_up:
        del proof.hints[name], proof.per_module[name]
    proof.per_module.update(run_segments(proof, after, anew=after))
    return True


def _numbers_that_differ(proof: Proof) -> list[str]:
    return [name for name in proof.differing if proof.per_module[name].relative is not None]


def _acquit(proof: Proof, again: Difference) -> None:
    """Take another comparison of a value for the one that differs, if it agrees."""
    if again.status == "agree":
        proof.per_module[again.name] = again


def _computed_in_double(proof: Proof, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Values computed from the right ones before them with float64 kernels, where the runtime has them.

    If these are right, it is the runtime's float32 kernels that are less exact than the type, whatever the file says.
    """
    if names:
        cut = segmented(proof.tagged.model, proof.hints, names, proof.run.dtypes)
        feeds = proof.inputs_of(value.name or "" for value in cut.graph.inputs)
        for found, _ in run_in_double(cut, proof.tagged.path.parent, feeds, proof.provider):
            yield from found.items()


def move_blame(proof: Proof) -> None:
    """Where a stretch that is wrong has nodes of several calls, try what they get and return as values between them.

    A value has to be a tensor of PyTorch's if what follows it becomes right once it is.
    """
    copies: set[str] = set()
    if proof.differing:
        copies = copied_values(proof.tagged.model, proof.run, proof.feeds).keys() | _foreign_values(proof)
    for name in proof.differing:
        sure = proof.hints.keys() - copies
        nodes = nodes_before([proof.nodes[name]], sure)
        calls = {call for node in nodes if (owner := owner_of(node)) is not None for call in owner.calls}
        made = {value.name or "" for node in nodes for value in node.outputs} - sure
        tried: set[tuple[str, str]] = set()
        for tensor in proof.evidence.tensors:
            fitting = fitting_values(proof.tagged, proof.run, tensor) if tensor.call in calls else []
            fitting = [value for value in fitting if value in made and proof.hints.get(value) != tensor.content]
            if len(fitting) != 1 or (fitting[0], tensor.content) in tried or len(tried) == _TRIALS:
                continue
            tried.add((fitting[0], tensor.content))
            unsure = (made & proof.hints.keys()) - {name}
            ways = [(tensor.content, dict[str, str]()), *_in_rows_before(proof, fitting[0], tensor.content, made)]
            if any(_is_cause(proof, fitting[0], content, name, unsure, laid) for content, laid in ways):
                break


def _foreign_values(proof: Proof) -> set[str]:
    """Values that have the numbers of a tensor, and are in the file where this never passes.

    What is wrong in one call may be right in another, as a state of zeros, and what a recurrence makes of it.
    """
    calls = proof.tagged.calls
    travels: dict[str, list[SeenTensor]] = {}
    for tensor in proof.evidence.tensors:
        if tensor.call in calls:
            travels.setdefault(tensor.content, []).append(tensor)
    found = set()
    for name, content in proof.hints.items():
        tensors = travels.get(proof.evidence.base(content), [])
        if name not in proof.nodes or not tensors:
            continue
        node = proof.nodes[name]
        users = [user for value in node.outputs if value.name == name for user, _ in value.uses()]
        made, taken = _calls_of(proof, [node]), _calls_of(proof, users)
        if not made or any(one in calls.stack(t.call) or t.call in calls.stack(one) for one in made for t in tensors):
            only_taken = taken and all(tensor.side == "inputs" for tensor in tensors)
            if not only_taken or any(t.call in calls.stack(one) for one in taken for t in tensors):
                continue
        found.add(name)
    return found


def _calls_of(proof: Proof, nodes: Collection[ir.Node]) -> set[ModuleCall]:
    """The owners of some nodes."""
    owners = (owner_of(node) for node in nodes)
    return {call for owner in owners if owner is not None for call in owner.calls if call in proof.tagged.calls}


def _in_rows_before(
    proof: Proof, name: str, content: str, made: Collection[str]
) -> Iterator[tuple[str, dict[str, str]]]:
    """The contents that a value may be if its rows have the order of those that a value before it had.

    That was given up, since what follows is wrong. Each content is with the values that have their rows in this order.

    Args:
        made: The values before.
    """
    width = proof.run.shapes[name][-1] if proof.run.shapes[name] else 0
    found: dict[bytes, tuple[str, dict[str, str]]] = {}
    for one, laid in proof.layouts.items():
        if one in made and one not in proof.hints and one != name:
            ordered = with_rows_of(proof.evidence, laid, proof.run.shapes[one][-1], content, name, width)
            if ordered is not None:
                key = proof.evidence.array(ordered).tobytes()
                found.setdefault(key, (ordered, {}))[1][one] = laid
    yield from found.values()


_TRIALS = 12
"""How many values are tried for one that differs: each is a session."""


def _is_cause(proof: Proof, value: str, content: str, name: str, unsure: set[str], laid: Mapping[str, str]) -> bool:
    """Whether a value that differs is right once another one is. If so, that one is compared from now on.

    The other value is not the cause if something else that follows from it was right before and is wrong now.

    Args:
        unsure: Boundaries between them that may not be any: their numbers are those of an earlier value.
        laid: Values before it that are boundaries again then, to their contents in another layout.
    """
    before = dict(proof.hints)
    for other in unsure:
        del proof.hints[other]
    proof.hints.update({**laid, value: content})
    agreeing = (n for n, one in proof.per_module.items() if one.status == "agree" and n in proof.hints and n != value)
    right = [n for n in agreeing if value in taken_by(nodes_before([proof.nodes[n]], proof.hints), proof.hints)]
    compared = run_segments(proof, [value, name, *right, *laid], anew=right)
    if compared[value].status == "differ" and all(compared[n].status != "differ" for n in (name, *right, *laid)):
        for other in unsure:
            proof.per_module.pop(other, None)
        proof.per_module.update(compared)
        return True
    proof.hints.clear()
    proof.hints.update(before)
    return False


def fitting_values(tagged: TaggedFile, run: FileRun, tensor: SeenTensor) -> list[str]:
    """The values of a tensor's type and shape that cross the boundary of its call on its side, by the tags."""
    boundary = tagged.boundaries[tensor.call]
    sides: Mapping[Side, Collection[ir.Value]] = {"inputs": boundary.inputs, "outputs": boundary.outputs}
    return [
        name
        for value in sides[tensor.side]
        if (name := value.name or "") in run.shapes
        and (run.shapes[name], run.dtypes[name]) == (tensor.shape, tensor.dtype)
    ]

"""Checks that each module of a file computes what the PyTorch module computes, and that the tags are right.

The file runs twice, without the runtime's optimizer:
- *end to end*, from its inputs: the tensors of the PyTorch run are recognized by their numbers;
- *per module*, cut at all recognized values: each segment between them gets PyTorch's values, so that an error shows
  where it originates (:mod:`modelexport.verify.segments`).
Neither needs the sidecar. A tensor that an error has made unrecognizable is looked up at the boundary of its call.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.limits import BATCH_BYTES
from modelexport.graph.owners import owner_of
from modelexport.runtime import sessions
from modelexport.runtime.evidence import Evidence
from modelexport.tagged.file import TaggedFile
from modelexport.verify.differences import UNMEASURED_UNITS, Difference, compare_arrays, worst
from modelexport.verify.matching import FileRun, run_file, tensors_by_call
from modelexport.verify.placement import Misplaced, find_misplaced
from modelexport.verify.segments import GIVEN, owners_between, segmented
from modelexport.verify.verdicts import CallStatus, CallVerdict


@dataclass
class Proof:
    """The results of the two runs of a file."""

    tagged: TaggedFile
    evidence: Evidence
    run: FileRun
    hints: dict[str, str]
    """Name of a value of the main graph to the content that it has, or should have."""
    per_module: dict[str, Difference]
    misplaced: list[Misplaced] = field(default_factory=list)
    wrong_weights: Mapping[ModuleCall, str] = field(default_factory=dict)
    """Calls whose nodes use initializers that differ from the model's, to a description of the error."""

    @cached_property
    def nodes(self) -> Mapping[str, ir.Node]:
        """Name of a value of the main graph to the node that produces it."""
        return {value.name or "": node for node in self.tagged.model.graph for value in node.outputs}


def prove_calls(
    tagged: TaggedFile,
    feeds: Mapping[str, Any],
    evidence: Evidence,
    *,
    provider: str = sessions.CPU,
    modules: Collection[ModuleCall] = (),
    batch_bytes: int = BATCH_BYTES,
) -> Proof:
    """Run a file and compare it with a PyTorch run.

    Args:
        feeds: The inputs of the file.
        modules: The calls to compare, with those inside them; all if empty.

    Raises:
        UsageError: ONNX Runtime cannot load the file, or does not have the provider.
    """
    run = run_file(tagged.model, tagged.path.parent, feeds, evidence, provider=provider, batch_bytes=batch_bytes)
    guessed = _from_tags(tagged, run, evidence)
    proof = Proof(tagged, evidence, run, {**_best(run), **guessed, **_ends(tagged, run, evidence)}, {})
    chosen = set(modules)
    while True:
        wanted = [name for name in proof.nodes if name in proof.hints]
        if chosen:
            wanted = [name for name in wanted if _concerns(tagged, proof.nodes[name], chosen)]
        proof.per_module = _run_segments(proof, wanted, feeds, provider, batch_bytes)
        # Experts may compute their tokens in another order, and a value may only be near: the values fed were wrong.
        mistaken = [name for name in guessed if name in proof.hints and _is_permuted(proof, name)]
        mistaken += [name for name in _second_best(proof) if proof.per_module[name].status == "differ"]
        if not mistaken:
            break
        for name in mistaken:
            del proof.hints[name]
    _measure_noise(proof)
    proof.misplaced.extend(find_misplaced(tagged.model, tagged.calls, run, evidence))
    return proof


def _concerns(tagged: TaggedFile, node: ir.Node, chosen: set[ModuleCall]) -> bool:
    owner = owner_of(node)
    return owner is not None and any(not chosen.isdisjoint(tagged.calls.stack(call)) for call in owner.calls)


def _best(run: FileRun) -> dict[str, str]:
    """The values for each content: the nearest, and others that are equally near."""
    by_content: dict[str, list[str]] = defaultdict(list)
    for name, content in run.contents.items():
        by_content[content].append(name)
    kept = {}
    for content, names in by_content.items():
        least = min(run.errors[name] for name in names)
        kept.update({name: content for name in names if run.errors[name] <= max(4 * least, 1e-6)})
    return kept


def _ends(tagged: TaggedFile, run: FileRun, evidence: Evidence) -> dict[str, str]:
    """The outputs of the file, matched with the model's outputs even if they are near other contents."""
    root = tagged.calls.calls[0].call
    right = [tensor for tensor in evidence.tensors if tensor.call == root and tensor.side == "outputs"]
    values = [value.name or "" for value in tagged.model.graph.outputs]
    if len(right) != len(values):
        return {}
    return {
        name: tensor.content
        for name, tensor in zip(values, right, strict=True)
        if name in run.shapes and (run.shapes[name], run.dtypes[name]) == (tensor.shape, tensor.dtype)
    }


def _from_tags(tagged: TaggedFile, run: FileRun, evidence: Evidence) -> dict[str, str]:
    """Values matched by tags with the tensors that no value was recognized as.

    At the boundary that a tensor crosses first, it is matched with the value of its type and shape.
    """
    found: dict[str, str] = {}
    seen = set(run.contents.values())
    gets = {call: {t.content for t in tensors} for call, tensors in tensors_by_call(evidence, "inputs").items()}
    same = set(_same_calls(tagged, evidence))
    root = tagged.calls.calls[0].call
    for tensor in evidence.tensors:
        call = tensor.call
        if tensor.content in seen or call not in same or not np.prod(tensor.shape):
            continue
        if tensor.side == "outputs" and tensor.content in gets.get(call, ()):
            continue
        boundary = tagged.boundaries[call]
        sides = boundary.inputs if tensor.side == "inputs" else boundary.outputs
        fitting = [
            name
            for value in sides
            if (name := value.name or "") in run.shapes
            and name not in run.contents
            and name not in found
            and (run.shapes[name], run.dtypes[name]) == (tensor.shape, tensor.dtype)
        ]
        if len(fitting) == 1 or (fitting and call == root):
            found[fitting[0]] = tensor.content
            seen.add(tensor.content)
    return found


def _same_calls(tagged: TaggedFile, evidence: Evidence) -> list[ModuleCall]:
    """The calls that are the same in PyTorch and in the file: a module may be called for each group of tokens in one
    and once in the other."""
    there = Counter(call.path for call in evidence.parents)
    here = Counter(traced.call.path for traced in tagged.calls)
    return [t.call for t in tagged.calls if there[t.call.path] == here[t.call.path]]


def _run_segments(
    proof: Proof, wanted: Sequence[str], feeds: Mapping[str, Any], provider: str, batch_bytes: int
) -> dict[str, Difference]:
    run, evidence, hints = proof.run, proof.evidence, proof.hints
    right = {name: evidence.array(content) for name, content in hints.items()}
    found: dict[str, Difference] = {}
    for batch in sessions.split_batches({name: right[name].nbytes for name in wanted}, batch_bytes):
        cut = segmented(proof.tagged.model, hints, batch)
        session = sessions.open_session(cut, folder=proof.tagged.path.parent, provider=provider)
        inputs = {}
        for name in sessions.input_names(session):
            known = name.removesuffix(GIVEN)
            inputs[name] = right[known].reshape(run.shapes[known]) if name.endswith(GIVEN) else feeds[name]
        for name, array in sessions.run_session(session, inputs).items():
            found[name] = compare_arrays(name, right[name].reshape(run.shapes[name]), array)
            if found[name].status == "differ":
                run.arrays[name] = array
    return found


def _second_best(proof: Proof) -> list[str]:
    """Recognized values that are not the nearest of their content."""
    nearest: dict[str, str] = {}
    errors = proof.run.errors
    for name, content in proof.hints.items():
        if name in errors and (content not in nearest or errors[name] < errors[nearest[content]]):
            nearest[content] = name
    ends = {value.name for value in proof.tagged.model.graph.outputs}
    others = [n for n, c in proof.hints.items() if n in proof.per_module and n in errors and nearest[c] != n]
    return [name for name in others if name not in ends]


def _is_permuted(proof: Proof, name: str) -> bool:
    """Whether a value that differs has the right elements in another order."""
    if name not in proof.per_module or proof.per_module[name].status != "differ" or name not in proof.run.arrays:
        return False
    right = np.sort(proof.evidence.array(proof.hints[name]), axis=None)
    found = np.sort(proof.run.arrays[name], axis=None)
    return right.dtype == found.dtype and compare_arrays(name, right, found).status == "agree"


def _measure_noise(proof: Proof) -> None:
    """If errors exceed a few units, measure PyTorch's own rounding before deciding that a value differs."""
    suspects = [name for name, one in proof.per_module.items() if one.status == "differ" and one.relative is not None]
    if not suspects:
        return
    exact = proof.evidence.in_float64(from_right_values=True)
    pairs = zip(proof.evidence.tensors, exact.tensors if exact else [], strict=False)
    known: dict[str, Any] = {}
    for tensor, its in pairs:
        if its.dtype == "float64" and its.shape == tensor.shape and tensor.side == "outputs":
            known.setdefault(tensor.content, exact.array(its.content) if exact else None)
    for name in suspects:
        right = proof.evidence.array(proof.hints[name])
        array = proof.run.arrays[name]
        precise = known.get(proof.hints[name])
        proof.per_module[name] = compare_arrays(
            name,
            right.reshape(array.shape),
            array,
            exact=precise.reshape(array.shape) if precise is not None else None,
            **({} if precise is not None else {"units": UNMEASURED_UNITS}),
        )


def verdicts_of(proof: Proof, modules: Collection[ModuleCall] = ()) -> list[CallVerdict]:
    """The verdict on every call of the file, or on ``modules`` and the calls inside them."""
    return _Verdicts(proof).of([t.call for t in proof.tagged.calls if _shown(proof.tagged, t.call, modules)])


def _shown(tagged: TaggedFile, call: ModuleCall, modules: Collection[ModuleCall]) -> bool:
    return not modules or not set(modules).isdisjoint(tagged.calls.stack(call))


class _Verdicts:
    def __init__(self, proof: Proof) -> None:
        self._proof = proof
        tagged = proof.tagged
        self._inside: set[ModuleCall] = set()
        self._counts: Counter[ModuleCall] = Counter()
        for node in tagged.nodes:
            if (owner := owner_of(node)) is not None:
                self._counts[owner.call] += 1
                self._inside.update(a for call in owner.calls if call in tagged.calls for a in tagged.calls.stack(call))
        self._gets = tensors_by_call(proof.evidence, "inputs")
        self._returns = tensors_by_call(proof.evidence, "outputs")
        self._same = set(_same_calls(tagged, proof.evidence))
        self._values: dict[str, list[str]] = defaultdict(list)
        for name, content in proof.hints.items():
            self._values[content].append(name)
        self._wrong = self._blamed()
        self._own: dict[ModuleCall, list[Difference]] = defaultdict(list)
        for name, difference in proof.per_module.items():
            owner = owner_of(proof.nodes[name])
            for call in owner.calls if owner is not None else ():
                self._own[call].append(difference)

    def _blamed(self) -> dict[ModuleCall, list[Difference]]:
        """The calls whose nodes compute the differing values."""
        blamed: dict[ModuleCall, list[Difference]] = defaultdict(list)
        for name, difference in self._proof.per_module.items():
            if difference.status != "differ":
                continue
            for address in owners_between(self._proof.nodes[name], self._proof.hints):
                blamed[ModuleCall.parse(address)].append(difference)
        return blamed

    def of(self, calls: Sequence[ModuleCall]) -> list[CallVerdict]:
        given, lacking = defaultdict(list), defaultdict(list)
        for one in self._proof.misplaced:
            for call in one.given:
                given[call].append(one)
            for call in one.belongs:
                lacking[call].append(one)
        return [self._verdict(call, given[call], lacking[call]) for call in calls]

    def _verdict(self, call: ModuleCall, given: list[Misplaced], lacking: list[Misplaced]) -> CallVerdict:
        compared = [
            self._proof.per_module[name]
            for tensor in self._returns.get(call, [])
            for name in self._values[tensor.content]
            if name in self._proof.per_module
        ]
        own = worst(self._wrong[call]) or worst([*self._own[call], *compared])
        chain = worst(
            [
                self._proof.run.differences[name]
                for tensor in self._returns.get(call, [])
                for name in self._values[tensor.content]
                if name in self._proof.run.differences
            ]
        )
        status, reason = self._status(call, given, lacking, compared)
        return CallVerdict(
            address=call.address,
            tag=self._proof.tagged.tags[call],
            status=status,
            reason=reason,
            nodes=self._counts[call],
            end_to_end=chain,
            per_module=own,
        )

    def _status(
        self, call: ModuleCall, given: list[Misplaced], lacking: list[Misplaced], compared: list[Difference]
    ) -> tuple[CallStatus, str]:
        if call in self._proof.wrong_weights:
            return "differ", self._proof.wrong_weights[call]
        if given:
            one = given[0]
            return "differ", f"the tags are wrong: {_count(given)} computed in {_names(one.belongs)}, {one.node} first"
        if lacking and self._lacks(call, lacking):
            one = lacking[0]
            return "differ", f"the tags are wrong: {_count(lacking)} given to {_names(one.given)}, {one.node} first"
        if self._wrong[call]:
            difference = worst(self._wrong[call])
            assert difference is not None
            return "differ", f"{difference.name}: {difference.reason}"
        if call not in self._inside:
            return "no nodes", ""
        if compared or self._own[call]:
            return "agree", ""
        return "not compared", self._unseen(call)

    def _lacks(self, call: ModuleCall, lacking: list[Misplaced]) -> bool:
        """Whether the lacking nodes can only belong to the call."""
        return any(one.belongs == (call,) for one in lacking)

    def _unseen(self, call: ModuleCall) -> str:
        if call not in self._proof.evidence.parents:
            return "PyTorch's run has no such call: it is inside a branch, or its module runs differently when exported"
        if call not in self._same:
            return "PyTorch calls its module a different number of times than the file"
        if not self._returns.get(call):
            return "it returns no tensor"
        return "none of the tensors that it returns is a value of the file: there they have another layout or type"


def _count(misplaced: list[Misplaced]) -> str:
    return f"{len(misplaced)} of its nodes {'is' if len(misplaced) == 1 else 'are'}"


def _names(calls: Sequence[ModuleCall]) -> str:
    return ", ".join(map(str, calls[:3])) + (" ..." if len(calls) > 3 else "")


def sampled_calls(tagged: TaggedFile, count: int, *, seed: int = 0) -> list[ModuleCall]:
    """A sample of the calls that own nodes, in the order in which they began; all if there are at most ``count``."""
    owning = {call for node in tagged.nodes if (owner := owner_of(node)) is not None for call in owner.calls}
    calls = [traced.call for traced in tagged.calls if traced.call in owning]
    chosen = set(random.Random(seed).sample(range(len(calls)), min(count, len(calls))))
    return [call for index, call in enumerate(calls) if index in chosen]

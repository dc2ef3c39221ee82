"""Two runs of a file against a run of the PyTorch model.

- *end to end*, from its inputs: there the tensors of the PyTorch run are recognised by their numbers;
- *per module*, cut at all recognised values, each stretch between them fed with PyTorch's, so that an error shows
  where it is made (:mod:`modelexport.verify.segments`).

Neither needs the sidecar. A tensor that a fault has made unrecognisable is looked for at the boundary of its call. The
runtime's optimiser is off.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.core.calls import ModuleCall, Side
from modelexport.core.limits import BATCH_BYTES
from modelexport.graph.initializers import bind_tensors
from modelexport.graph.nodes import initializers
from modelexport.graph.owners import owner_of
from modelexport.runtime import sessions
from modelexport.runtime.evidence import Evidence, SeenTensor
from modelexport.tagged.file import TaggedFile
from modelexport.verify.differences import ALLOWED_OF_ONE, ALLOWED_UNITS, UNMEASURED_UNITS, Difference, compare_arrays
from modelexport.verify.layouts import LaidOut, find_layouts
from modelexport.verify.localizing import Suspects, copied_values, find_suspects, nodes_between, taken_by
from modelexport.verify.matching import FileRun, run_file, tensors_by_call
from modelexport.verify.placement import Misplaced, find_misplaced
from modelexport.verify.segments import GIVEN, given_name, segmented
from modelexport.verify.ties import FileChoice, as_tie, fed, find_choices, wrong_choices


@dataclass
class Proof:
    """What the two runs of a file showed."""

    tagged: TaggedFile
    evidence: LaidOut
    run: FileRun
    feeds: Mapping[str, Any]
    provider: str
    batch_bytes: int
    hints: dict[str, str]
    """Name of a value of the main graph to the content that it is, or should be."""
    choices: Sequence[FileChoice] = ()
    """Where the file takes the largest or the smallest of some scores, as PyTorch does."""
    per_module: dict[str, Difference] = field(default_factory=dict)
    suspects: Mapping[str, Suspects] = field(default_factory=dict)
    """Values that differ to the nodes that may have made them so."""
    misplaced: list[Misplaced] = field(default_factory=list)
    wrong_weights: Mapping[ModuleCall, str] = field(default_factory=dict)
    """Calls whose nodes use initializers that are not the model's, to what is wrong."""

    @cached_property
    def nodes(self) -> Mapping[str, ir.Node]:
        """Name of a value of the main graph to the node that makes it."""
        return {value.name or "": node for node in self.tagged.model.graph for value in node.outputs}

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Name of a node of the main graph to where in it it is."""
        return {node.name or "": index for index, node in enumerate(self.tagged.model.graph)}

    @property
    def contents(self) -> dict[str, str]:
        """Values to the contents that they are, as PyTorch has them."""
        return {name: self.evidence.base(content) for name, content in self.hints.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the values of the file in the run, those of its inputs included."""
        return {**{name: tuple(array.shape) for name, array in self.feeds.items()}, **self.run.shapes}

    @property
    def differing(self) -> list[str]:
        """The values that are not what they should be."""
        return [name for name, one in self.per_module.items() if one.status == "differ"]

    def right(self, name: str) -> Any:
        """What a value of the file should be."""
        return self.evidence.array(self.hints[name]).reshape(self.run.shapes[name])

    def inputs_of(self, names: Iterable[str]) -> dict[str, Any]:
        """What the inputs of a cut file get."""
        return {n: self.right(n.removesuffix(GIVEN)) if n.endswith(GIVEN) else self.feeds[n] for n in names}


def prove_calls(
    tagged: TaggedFile,
    feeds: Mapping[str, Any],
    evidence: Evidence,
    *,
    provider: str = sessions.CPU,
    modules: Collection[ModuleCall] = (),
    batch_bytes: int = 0,
) -> Proof:
    """Run a file against a PyTorch run.

    Args:
        feeds: The inputs of the file.
        modules: The calls to look at, with those inside them; all if there are none.
        batch_bytes: Bytes of values that are computed in one run; if 0, as many as the weights take, or more.

    Raises:
        UsageError: ONNX Runtime does not load the file, or does not have the provider.
    """
    model, folder = tagged.model, tagged.path.parent
    _read_weights(model)
    batch_bytes = batch_bytes or max(
        BATCH_BYTES, sum(v.const_value.nbytes for v in initializers(model) if v.const_value)
    )
    run = run_file(model, folder, feeds, evidence, provider=provider, batch_bytes=batch_bytes)
    choices, arrays = find_choices(model, folder, feeds, evidence, run.shapes, provider=provider)
    given: dict[str, Any] = {}
    if wrong_choices(choices, arrays, evidence):
        # What follows a choice is only recognised if it is PyTorch's. Whether the file's is as good, is seen below.
        given = fed(choices, arrays, evidence)
        run = run_file(model, folder, feeds, evidence, provider=provider, given=given, batch_bytes=batch_bytes)
    laid = LaidOut(evidence)
    others = find_layouts(model, folder, feeds, run, laid, given=given, provider=provider)
    run.contents.update({name: laid.base(content) for name, content in others.items()})
    guessed = _from_tags(tagged, run, evidence)
    ends = _ends(tagged, run, evidence)
    hints = {**_best(run), **guessed, **others, **ends}
    hints.update({pair.indices: pair.choice.indices for pair in choices})
    proof = Proof(tagged, laid, run, feeds, provider, batch_bytes, hints, choices)
    _compare(proof, {*guessed, *others} - ends.keys(), others.keys() - ends.keys(), set(modules))
    _measure_noise(proof)
    _move_blame(proof)
    boundary = proof.inputs_of(given_name(name) for name in proof.hints if name in proof.nodes)
    proof.suspects = find_suspects(
        model,
        folder,
        proof.nodes,
        proof.per_module,
        proof.hints,
        {**feeds, **boundary},
        run,
        evidence,
        provider=provider,
    )
    proof.misplaced.extend(find_misplaced(model, tagged.calls, run, evidence))
    return proof


def _read_weights(model: ir.Model) -> None:
    """Read the weights inside a file once, for all sessions; those beside it are read by the runtime."""
    inside = {value: value.const_value for value in initializers(model) if isinstance(value.const_value, ir.LazyTensor)}
    bind_tensors({value: ir.tensor(tensor.numpy(), tensor.dtype, name=tensor.name) for value, tensor in inside.items()})


def _compare(proof: Proof, unsure: set[str], laid: set[str], chosen: set[ModuleCall]) -> None:
    """Compare every hint, and give up those that turn out to be none."""
    while True:
        wanted = [name for name in proof.nodes if name in proof.hints]
        if chosen:
            wanted = [name for name in wanted if _concerns(proof.tagged, proof.nodes[name], chosen)]
        proof.per_module = _run_segments(proof, wanted)
        # Experts may compute their tokens in another order, and a value may only be near: what was fed on was wrong.
        mistaken = {name for name in unsure if name in proof.hints and _is_permuted(proof, name)}
        mistaken |= {name for name in _second_best(proof) if proof.per_module[name].status == "differ"}
        # Rows in a wrong order look like another layout, until something follows that is not.
        for name in proof.differing if laid else ():
            if laid & {name, *taken_by(nodes_between(proof.nodes[name], proof.hints), proof.hints)}:
                mistaken |= laid & proof.hints.keys()
        mistaken = mistaken or _without_effect(proof, wanted, unsure)
        if not mistaken:
            return
        laid -= mistaken
        for name in mistaken:
            del proof.hints[name]


def _without_effect(proof: Proof, wanted: Sequence[str], unsure: Collection[str]) -> set[str]:
    """Values that were taken for tensors by their tags alone, and differ, though what follows from them is right."""
    wrong = [name for name in proof.differing if name in unsure]
    if not wrong:
        return set()
    contents = {name: proof.hints.pop(name) for name in wrong}
    compared = _run_segments(proof, [name for name in wanted if name not in contents])
    found = set()
    for name in wrong:
        after = [n for n in compared if proof.nodes[name] in nodes_between(proof.nodes[n], proof.hints)]
        # The same integers can come from other numbers.
        tells = any(compared[n].relative is not None for n in after)
        if tells and all(compared[n].status != "differ" for n in after):
            found.add(name)
    proof.hints.update(contents)
    return found


def _concerns(tagged: TaggedFile, node: ir.Node, chosen: set[ModuleCall]) -> bool:
    owner = owner_of(node)
    return owner is not None and any(not chosen.isdisjoint(tagged.calls.stack(call)) for call in owner.calls)


def _best(run: FileRun) -> dict[str, str]:
    """The values that are a content: the nearest, and others that are as near."""
    by_content: dict[str, list[str]] = defaultdict(list)
    for name, content in run.contents.items():
        if name in run.errors:
            by_content[content].append(name)
    kept = {}
    for content, names in by_content.items():
        least = min(run.errors[name] for name in names)
        kept.update({name: content for name in names if run.errors[name] <= max(4 * least, 1e-6)})
    return kept


def _ends(tagged: TaggedFile, run: FileRun, evidence: Evidence) -> dict[str, str]:
    """The outputs of the file are what the model returns, whatever else they are near."""
    root = tagged.calls.calls[0].call
    right = [
        tensor
        for tensor in evidence.tensors
        if tensor.call == root and tensor.side == "outputs" and 0 not in tensor.shape  # what holds nothing is left out
    ]
    values = [value.name or "" for value in tagged.model.graph.outputs]
    if len(right) != len(values):
        return {}
    return {
        name: tensor.content
        for name, tensor in zip(values, right, strict=True)
        if name in run.shapes and (run.shapes[name], run.dtypes[name]) == (tensor.shape, tensor.dtype)
    }


def _from_tags(tagged: TaggedFile, run: FileRun, evidence: Evidence) -> dict[str, str]:
    """Values that should be tensors that no value is.

    Where a tensor first crosses a boundary, it is the one of its type and shape that does so in the file.
    """
    found: dict[str, str] = {}
    seen = set(run.contents.values())
    gets = {call: {t.content for t in tensors} for call, tensors in tensors_by_call(evidence, "inputs").items()}
    same = set(same_calls(tagged, evidence))
    root = tagged.calls.calls[0].call
    for tensor in evidence.tensors:
        call = tensor.call
        if tensor.content in seen or call not in same or 0 in tensor.shape:
            continue
        if tensor.side == "outputs" and tensor.content in gets.get(call, ()):
            continue
        fitting = [n for n in _fitting(tagged, run, tensor) if n not in run.contents and n not in found]
        if len(fitting) == 1 or (fitting and call == root):
            found[fitting[0]] = tensor.content
            seen.add(tensor.content)
    return found


def _fitting(tagged: TaggedFile, run: FileRun, tensor: SeenTensor) -> list[str]:
    """The values of a tensor's type and shape that cross the boundary of its call on its side, by the tags."""
    boundary = tagged.boundaries[tensor.call]
    sides: Mapping[Side, Collection[ir.Value]] = {"inputs": boundary.inputs, "outputs": boundary.outputs}
    return [
        name
        for value in sides[tensor.side]
        if (name := value.name or "") in run.shapes
        and (run.shapes[name], run.dtypes[name]) == (tensor.shape, tensor.dtype)
    ]


def same_calls(tagged: TaggedFile, evidence: Evidence) -> list[ModuleCall]:
    """The calls that PyTorch made as they are in the file: a module may be called for each group of tokens in one and
    once in the other."""
    there = Counter(call.path for call in evidence.parents)
    here = Counter(traced.call.path for traced in tagged.calls)
    return [t.call for t in tagged.calls if there[t.call.path] == here[t.call.path]]


def _is_settled(proof: Proof, name: str) -> bool:
    """Whether a value agrees end to end as closely as it has to from the right inputs: what is before it is right.

    An error in between would have to be undone by the rounding of what comes before it.
    """
    difference = proof.run.differences.get(name)
    if difference is None or difference.status != "agree" or proof.run.contents.get(name) != proof.hints[name]:
        return False
    if difference.relative is None:
        return True
    allowed = ALLOWED_UNITS * (difference.noise or 0.0)
    return difference.relative <= allowed and (difference.of_one or 0.0) <= ALLOWED_OF_ONE * allowed


def _run_segments(proof: Proof, wanted: Sequence[str]) -> dict[str, Difference]:
    """Compare values computed from the right ones before them, in as few runs as memory allows."""
    run, folder = proof.run, proof.tagged.path.parent
    found = {name: run.differences[name] for name in wanted if _is_settled(proof, name)}
    wanted = [name for name in wanted if name not in found]
    sizes = {name: proof.evidence.array(proof.hints[name]).nbytes for name in wanted}
    choices = {pair.indices: pair for pair in proof.choices}
    for batch in sessions.split_batches(sizes, proof.batch_bytes):
        scores = [choices[name].scores for name in batch if name in choices and choices[name].scores in proof.nodes]
        cut = segmented(proof.tagged.model, proof.hints, list(dict.fromkeys([*batch, *scores])), run.dtypes)
        session = sessions.open_session(cut, folder=folder, provider=proof.provider)
        arrays = sessions.run_session(session, proof.inputs_of(sessions.input_names(session)))
        for name in batch:
            found[name] = compare_arrays(name, proof.right(name), arrays[name])
            if found[name].status == "differ":
                run.arrays[name] = arrays[name]
                pair = choices.get(name)
                if pair and pair.is_tie(proof.evidence, {**proof.feeds, **arrays}[pair.scores], arrays[name]):
                    found[name] = as_tie(found[name])
    return found


def _second_best(proof: Proof) -> list[str]:
    """Recognised values that are not the nearest of their content."""
    nearest: dict[str, str] = {}
    errors = proof.run.errors
    for name, content in proof.hints.items():
        if name in errors and (content not in nearest or errors[name] < errors[nearest[content]]):
            nearest[content] = name
    ends = {value.name for value in proof.tagged.model.graph.outputs}
    others = [n for n, c in proof.hints.items() if n in proof.per_module and n in errors and nearest[c] != n]
    return [name for name in others if name not in ends]


def _is_permuted(proof: Proof, name: str) -> bool:
    """Whether a value that differs has the right numbers in another order."""
    if name not in proof.per_module or proof.per_module[name].status != "differ" or name not in proof.run.arrays:
        return False
    right = np.sort(proof.evidence.array(proof.hints[name]), axis=None)
    found = np.sort(proof.run.arrays[name], axis=None)
    return right.dtype == found.dtype and compare_arrays(name, right, found).status == "agree"


def _measure_noise(proof: Proof) -> None:
    """Where more differs than a few units, see what rounding does to PyTorch itself before anything is accused."""
    suspects = [name for name in proof.differing if proof.per_module[name].relative is not None]
    if not suspects:
        return
    exact = proof.evidence.in_float64(from_right_values=True)
    pairs = zip(proof.evidence.tensors, exact.tensors if exact else [], strict=False)
    known: dict[str, Any] = {}
    for tensor, its in pairs:
        if its.dtype == "float64" and its.shape == tensor.shape and tensor.side == "outputs":
            known.setdefault(tensor.content, exact.array(its.content) if exact else None)
    for name in suspects:
        right, array = proof.right(name), proof.run.arrays[name]
        precise = known.get(proof.hints[name])
        proof.per_module[name] = compare_arrays(
            name,
            right,
            array,
            exact=precise.reshape(array.shape) if precise is not None else None,
            **({} if precise is not None else {"units": UNMEASURED_UNITS}),
        )


def _move_blame(proof: Proof) -> None:
    """Where a stretch that is wrong has nodes of several calls, try what they get and return as values between them.

    A value has to be a tensor of PyTorch's if what follows it becomes right once it is.
    """
    copies = copied_values(proof.tagged.model, proof.run) if proof.differing else set()
    for name in proof.differing:
        sure = proof.hints.keys() - copies
        nodes = nodes_between(proof.nodes[name], sure)
        calls = {call for node in nodes if (owner := owner_of(node)) is not None for call in owner.calls}
        made = {value.name or "" for node in nodes for value in node.outputs} - sure
        tried: set[tuple[str, str]] = set()
        for tensor in proof.evidence.tensors:
            fitting = _fitting(proof.tagged, proof.run, tensor) if tensor.call in calls else []
            fitting = [value for value in fitting if value in made and proof.hints.get(value) != tensor.content]
            if len(fitting) != 1 or (fitting[0], tensor.content) in tried or len(tried) == _TRIALS:
                continue
            tried.add((fitting[0], tensor.content))
            if _is_cause(proof, fitting[0], tensor.content, name, (made & proof.hints.keys()) - {name}):
                break


_TRIALS = 12
"""How many values are tried for one that differs: each is a session."""


def _is_cause(proof: Proof, value: str, content: str, name: str, unsure: set[str]) -> bool:
    """Whether a value that differs is right once another one is. If so, that one is compared from now on.

    Args:
        unsure: Boundaries between them that may not be any: their numbers are those of an earlier value.
    """
    before = dict(proof.hints)
    for other in unsure:
        del proof.hints[other]
    proof.hints[value] = content
    compared = _run_segments(proof, [value, name])
    if compared[value].status == "differ" and compared[name].status != "differ":
        for other in unsure:
            proof.per_module.pop(other, None)
        proof.per_module.update(compared)
        return True
    proof.hints.clear()
    proof.hints.update(before)
    return False

"""Two runs of a file against a run of the PyTorch model.

- *end to end*, from its inputs: there the tensors of the PyTorch run are recognised by their numbers;
- *per module*, cut at all recognised values, each stretch between them fed with PyTorch's, so that an error shows
  where it is made (:mod:`modelexport.verify.segments`).

Neither needs the sidecar. A tensor that a fault has made unrecognisable is looked for at the boundary of its call. The
runtime's optimiser is off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import onnx_ir as ir

from modelexport.core.calls import ModuleCall, Side
from modelexport.core.limits import BATCH_BYTES
from modelexport.errors import UsageError
from modelexport.format import keys
from modelexport.graph.initializers import bind_tensors
from modelexport.graph.nodes import initializers
from modelexport.graph.owners import owner_of
from modelexport.runtime import sessions
from modelexport.runtime.evidence import Evidence
from modelexport.runtime.kernels import with_double_kernels
from modelexport.surgery.repeating import values_taken
from modelexport.tagged.file import TaggedFile
from modelexport.verify.blaming import fitting_values, measure_noise, move_blame
from modelexport.verify.bodies import calls_in_bodies, deciding_numbers, opened
from modelexport.verify.comparing import compare_hints
from modelexport.verify.differences import Difference
from modelexport.verify.layouts import LaidOut, find_layouts
from modelexport.verify.localizing import Suspects, find_suspects
from modelexport.verify.matching import FileRun, paths_called_as_often, returned_values, run_file, tensors_by_call
from modelexport.verify.placement import Misplaced, find_misplaced
from modelexport.verify.proof import Proof
from modelexport.verify.segments import given_name, nodes_before
from modelexport.verify.ties import fed, find_choices, scores_of, wrong_choices


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
        batch_bytes: Bytes of values that are computed in one run; if 0, twice as many as the weights take, or more.

    Raises:
        UsageError: ONNX Runtime does not load the file, or does not have the provider.
    """
    _read_weights(tagged.model)
    tagged = opened(tagged, feeds, provider=provider)
    model, folder = tagged.model, tagged.path.parent
    batch_bytes = batch_bytes or max(
        BATCH_BYTES, 2 * sum(v.const_value.nbytes for v in initializers(model) if v.const_value)
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
    hints = {**_without_chance(_best(run), tagged, run, evidence), **guessed, **others, **ends}
    hints.update({pair.indices: pair.choice.indices for pair in choices})
    made = {value.name or "" for node in model.graph for value in node.outputs}
    scores = scores_of([pair for pair in choices if pair.scores in made], arrays, evidence, {*hints, *run.contents})
    hints.update({name: pair.choice.scores for name, pair in scores.items()})
    numbers, wrong_decisions = deciding_numbers(tagged, run, evidence)
    hints.update(numbers)
    proof = Proof(
        tagged, laid, run, feeds, provider, batch_bytes, hints, others, choices, scores, wrong_decisions=wrong_decisions
    )
    compare_hints(proof, {*guessed, *others, *scores} - ends.keys(), others.keys() - ends.keys(), set(modules))
    measure_noise(proof)
    move_blame(proof)
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
        laid={name for name, content in proof.hints.items() if laid.base(content) != content},
    )
    if not proof.differing:
        _blame_for_shapes(proof)
    untold = _with_wrong_values(proof)
    proof.misplaced.extend(one for one in _misplaced(proof, run, given) if one.computed or one.node not in untold)
    return proof


def _with_wrong_values(proof: Proof) -> set[str]:
    """The nodes that may have made a value wrong, and those after them: what they compute does not tell their call."""
    found = {node for suspects in proof.suspects.values() for node in suspects.nodes}
    for node in proof.tagged.model.graph if found else ():
        if any(value is not None and value.producer() in found for value in values_taken(node)):
            found.add(node)
    return {node.name or "" for node in found}


def _misplaced(proof: Proof, run: FileRun, given: Mapping[str, Any]) -> list[Misplaced]:
    """The misplaced nodes: in this run, and in one without what may have made other numbers PyTorch's.

    The runtime's float32 kernels may compute no number of PyTorch's for a closed gate. What follows from a wrong value
    may be what another call computed: a module that a fault makes zero adds nothing to what it is added to.

    Args:
        given: Values of the file that their users get instead of what the file computes.
    """
    model, calls, evidence = proof.tagged.model, proof.tagged.calls, proof.evidence
    found = find_misplaced(model, calls, run, evidence)
    if not found:
        return found
    precise, _ = with_double_kernels(model, proof.provider)
    right = {name: proof.right(name) for name in proof.hints if _is_given(proof, name)}
    try:
        run = run_file(
            precise,
            proof.tagged.path.parent,
            proof.feeds,
            evidence,
            provider=proof.provider,
            given={**given, **right},
            batch_bytes=proof.batch_bytes,
        )
    except UsageError:  # the runtime says only then that it has no such kernels
        return found
    # These runs differ by rounding: what was recognised in another layout in one is the same value in the other.
    layouts = {name: proof.evidence.base(content) for name, content in proof.layouts.items() if name in run.prints}
    run.contents.update({name: content for name, content in layouts.items() if name not in run.contents})
    again = {one.node: one for one in find_misplaced(model, calls, run, evidence)}
    return [one for one in found if one.node in again]


def _is_given(proof: Proof, name: str) -> bool:
    """Whether the users of a value can get what it should be instead."""
    return name in proof.nodes and str(proof.right(name).dtype) == proof.run.dtypes[name]


def _read_weights(model: ir.Model) -> None:
    """Read the weights inside a file once, for all sessions; those beside it are read by the runtime."""
    inside = {value: value.const_value for value in initializers(model) if isinstance(value.const_value, ir.LazyTensor)}
    bind_tensors({value: ir.tensor(tensor.numpy(), tensor.dtype, name=tensor.name) for value, tensor in inside.items()})


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


def _without_chance(found: Mapping[str, str], tagged: TaggedFile, run: FileRun, evidence: Evidence) -> dict[str, str]:
    """Values that are a content, but for those of a few numbers that are where no call gets or returns it.

    What a fault makes zero is not a state of zeros elsewhere.
    """
    quiet = {name for name in found if run.prints[name].kind == "f" and not run.prints[name].telling}
    if not quiet:
        return dict(found)
    passing = {(t.content, t.call, t.side) for t in evidence.tensors}

    def passes(name: str, node: ir.Node, side: Side) -> bool:
        owner = owner_of(node)
        return owner is None or any((found[name], call, side) in passing for call in owner.calls)

    kept = set(found) - quiet
    for node in tagged.model.graph:
        for value in node.outputs:
            name = value.name or ""
            users = (user for user, _ in value.uses())
            if name in quiet and (passes(name, node, "outputs") or any(passes(name, one, "inputs") for one in users)):
                kept.add(name)
    return {name: content for name, content in found.items() if name in kept}


def _ends(tagged: TaggedFile, run: FileRun, evidence: Evidence) -> dict[str, str]:
    """The outputs of the file are what the model returns, whatever else they are near."""
    return {
        name: tensor.content
        for name, tensor in returned_values(tagged, evidence)
        if name in run.shapes and (run.shapes[name], run.dtypes[name]) == (tensor.shape, tensor.dtype)
    }


def _blame_for_shapes(proof: Proof) -> None:
    """Suspect the nodes that give outputs another shape or type than what the model returns, where no number is wrong.

    They are between the outputs and the last values before them with the numbers and the shape of PyTorch's tensors.
    """
    shapes: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for tensor in proof.evidence.tensors:
        shapes[tensor.content].add(tensor.shape)
    right = {name for name, content in proof.contents.items() if proof.run.shapes.get(name) in shapes[content]}
    suspects = dict(proof.suspects)
    for name, tensor in returned_values(proof.tagged, proof.evidence):
        shape, dtype = proof.run.shapes.get(name), proof.run.dtypes.get(name)
        if name in proof.nodes and shape is not None and (shape, dtype) != (tensor.shape, tensor.dtype):
            reason = f"expected {tensor.dtype}{list(tensor.shape)}, got {dtype}{list(shape)}"
            proof.per_module[name] = Difference(
                name=name, status="differ", reason=reason, dtype=dtype or "", shape=list(shape)
            )
            nodes = nodes_before([proof.nodes[name]], right - {name})
            suspects[name] = Suspects(name, sorted(nodes, key=lambda node: proof.positions[node.name or ""]))
    proof.suspects = suspects


def _from_tags(tagged: TaggedFile, run: FileRun, evidence: Evidence) -> dict[str, str]:
    """Values that should be tensors that no value is.

    Where a tensor first crosses a boundary, it is the one of its type and shape that does so in the file.
    """
    found: dict[str, str] = {}
    seen = set(run.contents.values())
    gets = {call: {t.content for t in tensors} for call, tensors in tensors_by_call(evidence, "inputs").items()}
    same = set(same_calls(tagged, evidence))
    root = tagged.calls.calls[0].call
    left_out = keys.OUTPUTS in tagged.model.metadata_props  # what is not in the file may be any of its outputs
    for tensor in evidence.tensors:
        call = tensor.call
        if tensor.content in seen or call not in same or 0 in tensor.shape:
            continue
        if tensor.side == "outputs" and (tensor.content in gets.get(call, ()) or (call == root and left_out)):
            continue
        fitting = [n for n in fitting_values(tagged, run, tensor) if n not in run.contents and n not in found]
        if len(fitting) == 1 or (fitting and call == root):
            found[fitting[0]] = tensor.content
            seen.add(tensor.content)
    return found


def same_calls(tagged: TaggedFile, evidence: Evidence) -> list[ModuleCall]:
    """The calls that PyTorch made as they are in the file."""
    same = paths_called_as_often(tagged.calls, evidence)
    # Branches that PyTorch did not run are left out of its run; their calls are numbered after the others.
    inside = calls_in_bodies(tagged)
    outside = paths_called_as_often((traced for traced in tagged.calls if traced.call not in inside), evidence)
    return [
        call
        for call in (traced.call for traced in tagged.calls)
        if call.path in same or (call.path in outside and call not in inside)
    ]

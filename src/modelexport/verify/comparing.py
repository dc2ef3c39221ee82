"""Compares the values of a file with PyTorch's tensors, each computed from the right ones before it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.graph.owners import owner_of
from modelexport.runtime import sessions
from modelexport.tagged.file import TaggedFile
from modelexport.verify.differences import ALLOWED_OF_ONE, Difference, compare_arrays, unmeasured_share
from modelexport.verify.layouts import other_layouts, with_rows_of
from modelexport.verify.localizing import taken_by
from modelexport.verify.proof import Proof
from modelexport.verify.segments import nodes_before, segmented
from modelexport.verify.ties import as_tie, chooses_alike


def compare_hints(proof: Proof, unsure: set[str], laid: set[str], chosen: set[ModuleCall]) -> None:
    """Compare every hint, and give up those that turn out to be none."""
    settled: set[str] = set()
    while True:
        wanted = [name for name in proof.nodes if name in proof.hints]
        if chosen:
            wanted = [name for name in wanted if _concerns(proof.tagged, proof.nodes[name], chosen)]
        proof.per_module = run_segments(proof, wanted)
        # Experts may compute their tokens in another order, and a value may only be near: what was fed on was wrong.
        mistaken = {name for name in unsure if name in proof.hints and _is_permuted(proof, name)}
        mistaken |= {name for name in _second_best(proof) if proof.per_module[name].status == "differ"}
        mistaken |= {name for name in proof.scores if proof.is_scores(name) and _chooses_alike(proof, name)}
        # Rows in a wrong order look like another layout, until something follows that is not.
        if laid and proof.differing and _is_laid_out_wrongly(proof, laid, settled):
            mistaken |= (laid - settled) & proof.hints.keys()
        mistaken = mistaken or _without_effect(proof, wanted, unsure)
        if not mistaken:
            return
        laid -= mistaken
        for name in mistaken:
            del proof.hints[name]


def _is_laid_out_wrongly(proof: Proof, laid: set[str], settled: set[str]) -> bool:
    """Whether the other layout of a value may be a fault, since what follows from it is wrong.

    It is not if the value itself is wrong and all that follows from it is right once it is given, or if what follows is
    wrong in every order of the axes. In the order in which it becomes right, it is compared from now on. Nor is the
    order of rows, if what is wrong after it leads to what is right once that has its rows in the same order.

    Args:
        settled: Values whose layout is known; more are added.
    """
    found = False
    places = {name: place for place, name in enumerate(proof.nodes)}
    for name in sorted((laid - settled) & proof.hints.keys(), key=lambda name: places[name]):
        if name in settled:  # with one before it
            continue
        after = [n for n in proof.per_module if _takes(proof, n, [name])]
        wrong = [n for n in after if proof.per_module[n].status == "differ"]
        chain, beyond = _chain(proof, name, laid)
        differs = any(proof.per_module[n].status == "differ" for n in (*chain[1:], *beyond))
        if len(chain) > 1 and differs and _is_first_wrong(proof, chain, beyond):
            settled.update(chain)
            continue
        if not wrong:
            sure = proof.per_module[name].status == "differ" and not any(n in laid - settled for n in after)
            settled.update([name] if sure else [])
            continue
        now = proof.hints[name]
        others = list(other_layouts(proof.evidence, now, name, proof.run.shapes[name]))
        for other in others:
            proof.hints[name] = other
            compared = _tried(proof, [name, *after])
            if all(compared[n].status != "differ" for n in after):
                proof.per_module.update(run_segments(proof, [name, *after]))
                break
        else:
            proof.hints[name] = now
        known = bool(others) or _keeps_rows(proof, name, wrong)
        settled.update([name] if known else [])
        found = found or not known
    return found


def _chain(proof: Proof, name: str, laid: Collection[str]) -> tuple[list[str], list[str]]:
    """A value in another layout with those that follow from it through others in one, and what follows from these."""
    chain, beyond, pending = [name], list[str](), [name]
    while pending:
        before = [pending.pop()]
        for other in proof.per_module:
            if other in chain or other in beyond or not _takes(proof, other, before):
                continue
            within = other in laid and other in proof.hints
            (chain if within else beyond).append(other)
            pending += [other] if within else []
    return chain, beyond


def _is_first_wrong(proof: Proof, chain: Sequence[str], beyond: Sequence[str]) -> bool:
    """Whether the first of some values has a wrong layout, which the others only got from it; all are compared so then.

    Many operations give rows or axes in the order in which they get them: all but the first are right, and so is what
    follows from them, once each gets what PyTorch's values before it are.
    """
    before = dict(proof.hints)
    proof.hints.update({name: proof.evidence.base(proof.hints[name]) for name in chain})
    wanted = [*chain, *beyond]
    compared = _tried(proof, wanted, anew=wanted)
    if all(compared[name].status != "differ" for name in wanted if name != chain[0]):
        proof.per_module.update(run_segments(proof, wanted, anew=wanted))
        return True
    proof.hints.update(before)
    return False


def _keeps_rows(proof: Proof, name: str, wrong: Sequence[str]) -> bool:
    """Whether rows have the order of the file, and what is wrong after them has it too; it is compared so from now on.

    If what is wrong becomes right in PyTorch's order of the rows, it is their order that is wrong.

    Args:
        name: A value with its rows in another order.
        wrong: Those that follow from it and differ.
    """
    evidence, shapes, before = proof.evidence, proof.run.shapes, dict(proof.hints)
    laid, width = before[name], shapes[name][-1]
    ordered = {
        n: content
        for n in wrong
        if shapes[n] and (content := with_rows_of(evidence, laid, width, before[n], n, shapes[n][-1])) is not None
    }
    proof.hints[name] = evidence.base(laid)
    if ordered and any(one.status == "differ" for one in _tried(proof, wrong).values()):
        proof.hints.update({name: laid, **ordered})
        after = [n for n in proof.per_module if n not in ordered and (n in wrong or _takes(proof, n, ordered))]
        compared = _tried(proof, after)
        tells = any(one.relative is not None for one in compared.values())
        if tells and all(one.status != "differ" for one in compared.values()):
            proof.per_module.update(run_segments(proof, [*ordered, *after]))
            return True
    proof.hints.clear()
    proof.hints.update(before)
    return False


def _takes(proof: Proof, name: str, others: Collection[str]) -> bool:
    """Whether a value is computed from one of some boundaries, with no other boundary between them."""
    return not taken_by(nodes_before([proof.nodes[name]], proof.hints), proof.hints).isdisjoint(others)


def _without_effect(proof: Proof, wanted: Sequence[str], unsure: Collection[str]) -> set[str]:
    """Values that were taken for tensors by their tags alone, and differ, though what follows from them is right."""
    wrong = [name for name in proof.differing if name in unsure]
    if not wrong:
        return set()
    contents = {name: proof.hints.pop(name) for name in wrong}
    compared = _tried(proof, [name for name in wanted if name not in contents])
    found = set()
    for name in wrong:
        after = [n for n in compared if proof.nodes[name] in nodes_before([proof.nodes[n]], proof.hints)]
        # The same integers can come from other numbers.
        tells = any(compared[n].relative is not None for n in after)
        if tells and all(compared[n].status != "differ" for n in after):
            found.add(name)
    proof.hints.update(contents)
    return found


def _concerns(tagged: TaggedFile, node: ir.Node, chosen: set[ModuleCall]) -> bool:
    owner = owner_of(node)
    return owner is not None and any(not chosen.isdisjoint(tagged.calls.stack(call)) for call in owner.calls)


def _is_settled(proof: Proof, name: str) -> bool:
    """Whether a value agrees end to end as closely as it has to from the right inputs: what is before it is right.

    An error in between would have to be undone by the rounding of what comes before it.
    """
    difference = proof.run.differences.get(name)
    if difference is None or difference.status != "agree" or proof.run.contents.get(name) != proof.hints[name]:
        return False
    if difference.relative is None:
        return True
    allowed = unmeasured_share(difference.dtype)
    of_one, of_row = difference.of_one or 0.0, difference.of_row or 0.0
    return difference.relative <= allowed and of_one <= ALLOWED_OF_ONE * allowed and of_row <= allowed


def run_segments(proof: Proof, wanted: Sequence[str], *, anew: Collection[str] = ()) -> dict[str, Difference]:
    """Compare values computed from the right ones before them, in as few runs as memory allows.

    Args:
        anew: Values that are computed though they agree end to end: what is given before them may be wrong.
    """
    run, folder = proof.run, proof.tagged.path.parent
    found = {name: run.differences[name] for name in wanted if name not in anew and _is_settled(proof, name)}
    wanted = [name for name in wanted if name not in found]
    sizes = {name: proof.evidence.array(proof.hints[name]).nbytes for name in wanted}
    choices = {pair.indices: pair for pair in proof.choices}
    for batch in sessions.split_batches(sizes, proof.batch_bytes):
        scores = [choices[name].scores for name in batch if name in choices and choices[name].scores in proof.nodes]
        cut = segmented(proof.tagged.model, proof.hints, list(dict.fromkeys([*batch, *scores])), run.dtypes)
        session = sessions.open_session(cut, folder=folder, provider=proof.provider)
        arrays = sessions.run_session(session, proof.inputs_of(sessions.input_names(session)))
        for name in batch:
            found[name] = compare_arrays(name, proof.right(name), arrays[name], by_row=True)
            if found[name].status == "differ":
                run.arrays[name] = arrays[name]
                pair = choices.get(name)
                if pair and pair.is_tie(proof.evidence, {**proof.feeds, **arrays}[pair.scores], arrays[name]):
                    found[name] = as_tie(found[name])
    return found


def _tried(proof: Proof, wanted: Sequence[str], *, anew: Collection[str] = ()) -> dict[str, Difference]:
    """Compare values with other boundaries for a moment; what was computed with the present ones stays known."""
    before = dict(proof.run.arrays)
    found = run_segments(proof, wanted, anew=anew)
    proof.run.arrays.clear()
    proof.run.arrays.update(before)
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


def _chooses_alike(proof: Proof, name: str) -> bool:
    """Whether scores that differ do so by nothing that a choice shows."""
    if name not in proof.per_module or proof.per_module[name].status != "differ" or name not in proof.run.arrays:
        return False
    return chooses_alike(proof.scores[name], proof.evidence, proof.run.arrays[name])


def _is_permuted(proof: Proof, name: str) -> bool:
    """Whether a value that differs has the right numbers in another order."""
    if name not in proof.per_module or proof.per_module[name].status != "differ" or name not in proof.run.arrays:
        return False
    right = np.sort(proof.evidence.array(proof.hints[name]), axis=None)
    found = np.sort(proof.run.arrays[name], axis=None)
    return right.dtype == found.dtype and compare_arrays(name, right, found).status == "agree"

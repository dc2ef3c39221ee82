"""Finds the calls whose nodes compute something else than PyTorch.

In a sound file every tensor that a module returns is a value of the file, or was fused away and shows in what follows.
So a call is wrong if its tensor is missing, and the values that leave its nodes are not right. The file runs once more
with PyTorch's tensors in the place of the wrong values. A value that was wrong only because its inputs were is right in
this run; what is still wrong is the call's own fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.owners import Evidence
from modelexport.graph.node_owners import owner_of
from modelexport.traces.tolerances import INFINITE, STILL_THE_SAME_TENSOR
from modelexport.traces.trace import Content, SeenTensor
from modelexport.verify.matched_values import Matches, telling_outputs

Pairs = Mapping[ir.Value, SeenTensor]
"""Values of the file to the tensors of PyTorch that they should be equal to."""


@dataclass
class Located:
    """The wrong calls, and why."""

    pairs: Pairs = field(default_factory=dict)
    """The values that differ from PyTorch's in the first run, to PyTorch's tensors."""
    errors: Mapping[ir.Value, float] = field(default_factory=dict)
    """Their errors in the second run, in which they are computed from right values."""
    blamed: dict[ModuleCall, tuple[ir.Node, str]] = field(default_factory=dict)
    """The calls whose nodes are wrong, each to the first such node and the reason."""


Refused = AbstractSet[tuple[ir.Value, Content]]
"""Values and tensors that are not the same in a sound file."""


def find_wrong_values(
    matches: Matches, outputs: Sequence[tuple[ir.Value, SeenTensor]], again: Callable[[Pairs], Matches]
) -> tuple[dict[ir.Value, SeenTensor], Matches]:
    """The values that should be tensors of PyTorch and are not, and the run in which these tensors replace them.

    A value is taken for a tensor if the graph says so: an output, or the result of nodes whose calls the front end
    recorded. Any other is a guess, for a fused node may compute only a part of what a module does, or more. A guess is
    right if, with PyTorch's tensor in its place, what follows is right. If not all are, they are tried one by one in
    the order of the graph, so that each is judged where everything before it is right.

    Args:
        matches: The run without replacements.
        outputs: The outputs of the file, with what the model returns there.
        again: Runs the file with replacements.
    """
    pairs = find_pairs(matches, outputs)
    if not pairs:
        return pairs, matches
    replaced = again(pairs)
    ends = {value for value, _ in outputs}

    def is_shown(before: Matches, after: Matches, value: ir.Value, tensor: SeenTensor) -> bool:
        if _is_doubtful(before, value, tensor):
            return value in after.confirmed and not _wrong_users(after, value)
        return value in ends or _is_recorded(value) or value in after.confirmed

    if all(is_shown(matches, replaced, *pair) for pair in pairs.items()):
        return pairs, replaced
    order: Mapping[ir.Node | None, int] = {node: place for place, node in enumerate(matches.tagged.nodes)}
    kept = {value: tensor for value, tensor in pairs.items() if value.is_graph_output()}
    refused: set[tuple[ir.Value, Content]] = set()
    run = again(kept)
    while guesses := {v: t for v, t in find_pairs(run, outputs, kept, refused).items() if v not in kept}:
        value = min(guesses, key=lambda value: order.get(value.producer(), -1))
        tried = again({**kept, value: guesses[value]})
        if is_shown(run, tried, value, guesses[value]):
            kept[value], run = guesses[value], tried
        else:
            refused.add((value, guesses[value].content))
    # What was wrong only because of what came before is told, too.
    kept = {v: t for v, t in pairs.items() if t.content in run.equal_in_order.get(v, ())} | kept
    return kept, again(kept)


def _is_recorded(value: ir.Value) -> bool:
    """Whether the front end recorded the calls of the nodes that make and use a value."""
    nodes = [value.producer(), *(user for user, _ in value.uses())]
    return all(owner is not None and owner.evidence is Evidence.EXACT for owner in map(owner_of, filter(None, nodes)))


def find_pairs(
    matches: Matches,
    outputs: Sequence[tuple[ir.Value, SeenTensor]],
    kept: Pairs = MappingProxyType({}),
    refused: Refused = frozenset(),
) -> dict[ir.Value, SeenTensor]:
    """The values that may be tensors of PyTorch that they are not equal to.

    Args:
        outputs: The outputs of the file, with what the model returns there.
        kept: Those that are known already.
        refused: Those that are known not to be.
    """
    pairs = dict(kept)
    taken = {tensor.content for tensor in kept.values()}
    for value, tensor in outputs:
        if value in kept:
            continue
        is_computed = value.producer() is not None
        known = _fits(matches, value, tensor) and tensor.content in matches.equal_in_order.get(value, ())
        if is_computed and not known and not matches.is_equal(value, tensor) and not matches.is_random(value):
            pairs[value] = tensor
            taken.add(tensor.content)
    missing: dict[ModuleCall, list[SeenTensor]] = {}
    for traced in matches.tagged.calls:
        left = matches.tagged.boundaries[traced.call].outputs  # elsewhere the tensor may be right and not be used
        told = telling_outputs(matches.reference, traced.call)
        tensors = [tensor for tensor in told if not any(matches.is_equal(value, tensor) for value in left)]
        if tensors:
            missing[traced.call] = tensors
    for call in reversed(missing):  # inner calls first: what a caller passes on is theirs
        candidates = [
            value
            for value in matches.tagged.boundaries[call].outputs
            if value in matches.trace.prints and value not in pairs and not matches.is_random(value)
        ]
        suspects = [value for value in candidates if value not in matches.right]
        for tensor in missing[call]:
            if tensor.content in taken or any(matches.is_equal(value, tensor) for value in candidates):
                continue
            fitting = [value for value in suspects if value not in pairs and _fits(matches, value, tensor)]
            if not fitting and len(missing[call]) == len(suspects) == 1:
                fitting = suspects
            # What follows from a value may hardly depend on it, as the shares of attention do, and so proves little.
            others = [value for value in candidates if value not in pairs and value not in fitting]
            fitting += [value for value in others if _is_near(matches, value, tensor)]
            fitting += [value for value in others if _is_doubtful(matches, value, tensor)]
            fitting = [value for value in fitting if (value, tensor.content) not in refused]
            if fitting:
                pairs[fitting[0]] = tensor
                taken.add(tensor.content)
    return pairs


def _fits(matches: Matches, value: ir.Value, tensor: SeenTensor) -> bool:
    return matches.trace.shapes.get(value) == tensor.shape


def _is_near(matches: Matches, value: ir.Value, tensor: SeenTensor) -> bool:
    """Whether a value is near this tensor, and near no other."""
    return (
        _fits(matches, value, tensor)
        and not matches.equal_in_order[value]
        and matches.relative_distance(value, tensor) < STILL_THE_SAME_TENSOR
    )


def _is_doubtful(matches: Matches, value: ir.Value, tensor: SeenTensor) -> bool:
    """Whether a value that counts as right may be wrong: it is not the tensor, and what a user makes of it is wrong."""
    is_another = value in matches.right and tensor.content not in matches.equal_in_order.get(value, ())
    return is_another and _fits(matches, value, tensor) and bool(_wrong_users(matches, value))


def _wrong_users(matches: Matches, value: ir.Value) -> list[ir.Node]:
    """The users of a value whose results are wrong, although all of their inputs count as right."""
    return [
        user
        for user, _ in value.uses()
        if user in matches.suspect
        and all(taken is None or taken in matches.confirmed or taken.is_initializer() for taken in user.inputs)
    ]


def known_tensors(matches: Matches) -> dict[ir.Value, SeenTensor]:
    """The values that are known to be tensors that a call got or returned, each with the nearest such tensor."""
    seen = {
        tensor.content: tensor for tensor in reversed(matches.reference.tensors) if tensor.content.array is not None
    }
    known = {}
    for value in matches.right:
        prints = matches.trace.prints.get(value, ())
        contents = [content for content in matches.equal_in_order.get(value, ()) if content in seen]
        if len(prints) == 1 and prints[0].telling and contents and not matches.is_random(value):
            nearest = min(contents, key=lambda content: prints[0].distance(content.fingerprint))
            known[value] = seen[nearest]._replace(shape=matches.trace.shapes.get(value, seen[nearest].shape))
    return known


def replacements(pairs: Pairs) -> dict[ir.Value, Any]:
    """The arrays that take the place of values."""
    return {value: tensor.content.array.reshape(tensor.shape) for value, tensor in pairs.items()}


def locate(matches: Matches, pairs: Pairs) -> Located:
    """The calls whose nodes make wrong values.

    Args:
        matches: A run in which the values of ``pairs`` were replaced.
    """
    errors = {value: matches.trace.replaced.get(value, float("inf")) for value in pairs}
    located = Located(pairs, errors)
    for value, error in errors.items():
        if error <= matches.allowed_error(value):
            continue
        node = matches.first_suspect(value)
        owner = owner_of(node) if node is not None else None
        if node is not None and owner is not None:
            reason = (
                f"{value.name} is off by {error:.1e} of its size"
                if error < INFINITE
                else f"{value.name} {_other(matches, value, pairs[value])}"
            )
            known = located.blamed.get(owner.call)
            if known is None or _place(matches, node) < _place(matches, known[0]):
                located.blamed[owner.call] = node, reason
    return located


def _other(matches: Matches, value: ir.Value, tensor: SeenTensor) -> str:
    shape = matches.trace.shapes.get(value)
    if shape is None:
        return "is not computed"
    if shape != tensor.shape:
        return f"has the shape {list(shape)}, PyTorch's has {list(tensor.shape)}"
    return "is not PyTorch's: one of the two is zero, infinite or NaN"


def _place(matches: Matches, node: ir.Node) -> int:
    return matches.suspect.get(node, len(matches.tagged.nodes))

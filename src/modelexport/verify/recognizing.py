"""Recognizes the values of a file among the results of PyTorch's operations, and tells in which calls these were."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.graph.nodes import nested_graphs
from modelexport.runtime.evidence import Evidence
from modelexport.runtime.fingerprints import NEAR, Fingerprint, Index, fingerprint_of
from modelexport.verify.again_computed import Again
from modelexport.verify.leading import MOVES
from modelexport.verify.matching import FileRun, first_makers

Calls = frozenset[ModuleCall]


@dataclass(frozen=True)
class Recognized:
    """The calls in which PyTorch had the values of nodes."""

    known: Mapping[ir.Node, Calls]
    """The nodes whose values PyTorch had, to the calls in which it did."""
    copies: Mapping[ir.Node, Calls]
    """Nodes that only rearrange their inputs, to the calls that get or return these."""
    made: Mapping[ir.Node, Calls]
    """The same nodes, to the calls that computed the value and did not only pass it on."""
    travels: Mapping[str, Calls]
    """Each content to the calls that get, pass or return it."""
    again: Collection[ir.Node]
    """The nodes that compute again what they depend on, where PyTorch passes it on."""


@dataclass(frozen=True)
class _Where:
    """The calls in which a content was computed."""

    call: ModuleCall
    fingerprint: Fingerprint
    new: bool
    random: bool | None


def recognize(model: ir.Model, run: FileRun, evidence: Evidence, drawn: Collection[ir.Node]) -> Recognized:
    """Look up the values of the main graph among the results of PyTorch's operations.

    Args:
        drawn: The nodes that depend on random numbers.
    """
    apart = _apart(run)
    again = Again(model.graph, run.prints, apart)
    travels = _travels(evidence)
    index, results = Index[_Where](), Index[_Where]()
    for operation in evidence.computed:
        where = _Where(operation.call, operation.fingerprint, operation.new, operation.random)
        (results if operation.chosen else index).add(operation.fingerprint, where)
    makers = first_makers(evidence)
    known, copies, made = dict[ir.Node, Calls](), dict[ir.Node, Calls](), dict[ir.Node, Calls]()
    passing_on = set[ir.Node]()

    @cache
    def places(value: ir.Value) -> list[_Where]:
        return _places(value, run, index, apart, drawn)

    for node in model.graph:
        own = run.prints.get(node.outputs[0].name or "")
        given = [_taken(taken, own, run) for taken in node.inputs if taken is not None]
        if any(_same(own, one) for one in given):
            passing_on.add(node)
        looks_up = _looks_up(node) and not again.follows(node.outputs[0])
        looked_up = places(node.outputs[0]) if looks_up else []
        allowed = {place.call for place in looked_up if place.new}
        if node in passing_on or (node.domain == "" and node.op_type in MOVES and not allowed):
            copies[node] = travels.get(run.contents.get(node.outputs[0].name or "", ""), frozenset())
            shown = (place for value in node.outputs for place in places(value))
            made[node] = frozenset(place.call for place in shown if place.new)
        for value in node.outputs if nested_graphs(node) else ():
            allowed |= {place.call for place in _places(value, run, results, apart, drawn)}
        for value in () if allowed else node.outputs:
            allowed |= _allowed(node in copies, value, run, places(value), makers, again)
        if allowed:
            known[node] = frozenset(allowed)
    computing = {node for node in model.graph if node not in passing_on}
    for node in [node for node in known if node not in copies and len(known[node]) > 1 and len(node.outputs) == 1]:
        value = node.outputs[0]
        calls_in_turn = [place.call for place in places(value) if place.new]
        nodes_in_turn = again.in_turn(value, computing)
        if nodes_in_turn and len(nodes_in_turn) == len(calls_in_turn):
            known[node] = frozenset([calls_in_turn[nodes_in_turn.index(node)]])
    return Recognized(known, copies, made, travels, again.nodes)


def _taken(value: ir.Value, own: Fingerprint | None, run: FileRun) -> Fingerprint | None:
    """The fingerprint of an input: adding zeros to a constant gives the constant, wherever else it occurs."""
    tensor = value.const_value if value.is_initializer() else None
    if tensor is None or own is None or tensor.size != own.size or not tensor.dtype.is_floating_point():
        return run.prints.get(value.name or "")
    return fingerprint_of(tensor.numpy())


def _travels(evidence: Evidence) -> dict[str, Calls]:
    """Each content to the calls that get, pass or return it."""
    found: dict[str, set[ModuleCall]] = {}
    for tensor in evidence.tensors:
        found.setdefault(tensor.content, set()).add(tensor.call)
        parent = evidence.parents.get(tensor.call)
        if parent is not None:
            found[tensor.content].add(parent)
    return {content: frozenset(calls) for content, calls in found.items()}


def _allowed(
    copies: bool,
    value: ir.Value,
    run: FileRun,
    places: Sequence[_Where],
    makers: Mapping[str, ModuleCall],
    again: Again,
) -> set[ModuleCall]:
    own = run.prints.get(value.name or "")
    if own is None or not own.telling:
        return set()
    new, every = {place.call for place in places if place.new}, {place.call for place in places}
    allowed = new if new and not copies and (new == every or not again.computes(value)) else every
    content = run.contents.get(value.name or "")
    if content is not None and content in makers and (copies or not allowed):
        allowed.add(makers[content])
    return allowed


def _places(
    value: ir.Value, run: FileRun, index: Index[_Where], apart: float, drawn: Collection[ir.Node]
) -> list[_Where]:
    """Where PyTorch had a value; what depends on random numbers, only where it did there, too."""
    own = run.prints.get(value.name or "")
    if own is None or not own.telling:
        return []
    found = list(index.near(own, apart))
    return [place for place in found if place.random is not False] if value.producer() in drawn else found


def _looks_up(node: ir.Node) -> bool:
    """Whether a node takes elements that numbers of the run choose: no call had these before.

    One that repeats or cuts a tensor by sizes of the run does not: PyTorch may copy what it expanded in a later call.
    """
    if node.domain != "" or node.op_type not in _CHOOSING:
        return False
    producers = [value.producer() for value in node.inputs[1:] if value is not None and not value.is_initializer()]
    return any(producer is None or producer.inputs for producer in producers)  # not all by constants


_CHOOSING = frozenset({"Gather", "GatherElements", "GatherND"})
"""Operators that take elements by their numbers."""


def _apart(run: FileRun) -> float:
    """How far a value may be from an operation's result and still be it: some times what recognised values are off by.

    In a model with fresh weights many values are nearly others.
    """
    return min(NEAR, max(_NOISE * max(run.errors.values(), default=NEAR), _LEAST))


_NOISE = 16.0
_LEAST = 4e-6


def _same(one: Fingerprint | None, other: Fingerprint | None) -> bool:
    return one is not None and other is not None and one.same(other)

"""Opens the branches and loop bodies of a file, so that their values can be compared.

A runtime shows the values of the main graph only. So the nodes of both branches of an ``If`` move in front of it, where
they compute the same from the same values; the ``If`` then chooses among their results. Before a ``Loop`` or a ``Scan``
a copy of its body computes the first iteration. What PyTorch computes there is recorded likewise
(:mod:`modelexport.pytorch.bodies`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.errors import UsageError
from modelexport.graph.copies import copy_of, typed_as
from modelexport.graph.nodes import nested_graphs, nodes_of
from modelexport.graph.owners import OWNER, owner_of
from modelexport.runtime import sessions
from modelexport.runtime.evidence import Decision, Evidence
from modelexport.runtime.fingerprints import fingerprint_of
from modelexport.tagged.file import TaggedFile
from modelexport.verify.matching import FileRun

_MOVED = "modelexport.moved"
"""Marks the nodes that were moved into the main graph."""
_RESULTS = "modelexport.results"
"""What the branches of a node return, by their names."""
_REST = ".rest"
"""Appended to the names of a loop's own body, whose names its first iteration has."""


def opened(tagged: TaggedFile, feeds: Mapping[str, Any], *, provider: str) -> TaggedFile:
    """A file with open bodies, which computes the same; the file itself if it has none.

    A branch that is not taken may not run with these inputs; then only those that are taken are opened.
    """
    if not any(nested_graphs(node) for node in tagged.model.graph):
        return tagged
    folder = tagged.path.parent
    whole = _Opening(tagged.model).everything()
    if not _runs(whole, folder, feeds, provider):
        whole = _Opening(tagged.model).what_is_taken(
            lambda model, names: _values(model, names, folder, feeds, provider)
        )
    return replace(tagged, model=whole)


def calls_in_bodies(tagged: TaggedFile) -> frozenset[ModuleCall]:
    """The calls whose nodes, and those of the calls inside them, are all in branches or loop bodies."""
    outside, inside = set[ModuleCall](), set[ModuleCall]()
    for node in tagged.nodes:
        owner = owner_of(node)
        calls = {a for c in owner.calls if c in tagged.calls for a in tagged.calls.stack(c)} if owner else set()
        is_outside = node.graph is tagged.model.graph and _MOVED not in node.meta
        (outside if is_outside else inside).update(calls)
    return frozenset(inside - outside)


def deciding_numbers(tagged: TaggedFile, run: FileRun, evidence: Evidence) -> tuple[dict[str, str], dict[str, str]]:
    """The numbers that conditions of an opened file compare, to PyTorch's: a wrong one may decide rightly by chance.

    Conditions are in the order in which they end. They are those of PyTorch if there are as many, of the same calls.

    Returns:
        Names of values to the contents that they should be, and nodes that ask another condition to what is wrong.
    """
    nodes = [node for node in tagged.model.graph if node.op_identifier() == ("", "If", "")]
    owners = [owner_of(node) for node in nodes]
    hints: dict[str, str] = {}
    wrong: dict[str, str] = {}
    if [owner and owner.call for owner in owners] != [one.call for one in evidence.decisions]:
        return hints, wrong
    known = {n.content: fingerprint_of(evidence.array(n.content)) for one in evidence.decisions for n in one.numbers}
    for node, decision in zip(nodes, evidence.decisions, strict=True):
        hints.update(_results(node, decision, run))
        compared = _compared(node.inputs[0])
        names = [value.name or "" for value in compared]
        facts = [(run.dtypes.get(name), prod(run.shapes.get(name, (0,)))) for name in names]
        if facts != [(number.dtype, prod(number.shape)) for number in decision.numbers]:
            continue
        for value, name, number in zip(compared, names, decision.numbers, strict=True):
            if _cancels(value, run):
                continue
            same = {content for content, one in known.items() if one.near(run.prints[name])}
            if same and number.content not in same:
                wrong[node.name or ""] = f"{name} decides, which is not what PyTorch decides by"
            else:
                hints[name] = number.content
    return hints, wrong


def _cancels(value: ir.Value, run: FileRun) -> bool:
    """Whether a number is so much smaller than what it is computed from that rounding may be most of it."""
    producer, own = value.producer(), run.prints[value.name or ""]
    given = (run.prints.get(one.name or "") for one in (producer.inputs if producer is not None else ()) if one)
    return any(one is not None and own.norm < _CANCELLED * one.norm for one in given)


_CANCELLED = 1e-5


def _results(node: ir.Node, decision: Decision, run: FileRun) -> dict[str, str]:
    """What the branches of a node return, to what PyTorch's return: that of the one not taken is nobody's output."""
    found: dict[str, str] = {}
    for name, right in zip(("then_branch", "else_branch"), decision.results, strict=False):
        names = [value.name or "" for value in node.meta.get(_RESULTS, {}).get(name, ())]
        facts = [(run.dtypes.get(each), run.shapes.get(each)) for each in names]
        if facts == [(number.dtype, number.shape) for number in right]:
            found.update(zip(names, (number.content for number in right), strict=True))
    return found


def _compared(condition: ir.Value | None) -> list[ir.Value]:
    """The numbers from which a condition is computed by comparisons."""
    producer = condition.producer() if condition is not None else None
    if condition is None or producer is None:
        return []
    if condition.dtype is ir.DataType.BOOL:
        return [one for value in producer.inputs for one in _compared(value)]
    return [condition]


def _runs(model: ir.Model, folder: Path, feeds: Mapping[str, Any], provider: str) -> bool:
    try:
        _values(model, [value.name or "" for value in model.graph.outputs], folder, feeds, provider)
    except UsageError:
        return False
    return True


def _values(
    model: ir.Model, names: Collection[str], folder: Path, feeds: Mapping[str, Any], provider: str
) -> dict[str, Any]:
    made = {value.name: value for node in model.graph for value in node.outputs}
    copy = sessions.with_outputs(model, [made[name] for name in names if name in made])
    session = sessions.open_session(copy, folder=folder, provider=provider)
    return sessions.run_session(session, {name: feeds[name] for name in sessions.input_names(session)})


class _Opening:
    """A copy of a model, whose bodies are opened one after the other."""

    def __init__(self, model: ir.Model) -> None:
        self._model = copy_of(model)
        self._graph = self._model.graph
        self._seen: set[ir.Node] = set()
        self._names = {v.name or "" for v in (*self._graph.inputs, *self._graph.initializers.values())}
        self._names |= {value.name or "" for node in self._graph for value in node.outputs}
        self._nodes = {node.name or "" for node in self._graph}

    def everything(self) -> ir.Model:
        """Open both branches of each condition, and each loop."""
        while waiting := self._waiting():
            for node in waiting:
                self._open(node, ("then_branch", "else_branch"))
        return self._model

    def what_is_taken(self, values: Callable[[ir.Model, Collection[str]], Mapping[str, Any]]) -> ir.Model:
        """Open the branches that are taken."""
        while waiting := self._waiting():
            conditions = {node: node.inputs[0] for node in waiting if node.op_type == "If"}
            names = {value.name or "" for value in conditions.values() if value is not None and value.producer()}
            known = dict(values(self._model, sorted(names))) if names else {}
            for node, value in conditions.items():
                taken = known.get(value.name or "") if value is not None else None
                if taken is not None:
                    self._open(node, ("then_branch" if np.asarray(taken).all() else "else_branch",))
            self._seen.update(waiting)
        return self._model

    def _waiting(self) -> list[ir.Node]:
        """The nodes of the main graph with bodies that are not open."""
        return [node for node in self._graph if nested_graphs(node) and node not in self._seen]

    def _open(self, node: ir.Node, branches: Collection[str]) -> None:
        self._seen.add(node)
        if node.op_identifier() == ("", "If", ""):
            for name in branches:
                body = node.attributes[name].as_graph()
                node.meta.setdefault(_RESULTS, {})[name] = list(body.outputs)
                self._move(node, body)
        elif node.op_identifier() in (("", "Loop", ""), ("", "Scan", "")):
            body = node.attributes["body"].as_graph()
            first = body.clone(allow_outer_scope_values=True)
            given = self._first_of_loop(node) if node.op_type == "Loop" else self._first_of_scan(node, body)
            for inner in nodes_of(body):
                inner.meta.pop(OWNER, None)
                inner.name = f"{inner.name}{_REST}"
            for value in list(_values_of(body)):
                value.name = f"{value.name}{_REST}"
            for formal, value in zip(list(first.inputs), given, strict=True):
                formal.replace_all_uses_with(value, replace_graph_outputs=True)
            first.outputs.clear()
            self._take_in(node, first)

    def _move(self, node: ir.Node, body: ir.Graph) -> None:
        """Move the nodes of a branch before its node; the branch then passes on what they compute."""
        results = list(body.outputs)
        body.outputs.clear()
        self._take_in(node, body)
        for value in results:
            passed = ir.Node("", "Identity", [value])
            result = passed.outputs[0]
            result.name = f"{value.name}.of.{body.name}"
            result.shape, result.type = typed_as(value.shape, value.type)
            body.append(passed)
            body.outputs.append(result)

    def _take_in(self, node: ir.Node, body: ir.Graph) -> None:
        """Move the nodes and initializers of a body into the main graph, under names that are free there."""
        for value in list(body.initializers.values()):
            del body.initializers[value.name or ""]
            value.name = self._free(value.name or "", self._names)
            self._graph.register_initializer(value)
        inner = list(body)
        body.remove(inner)
        for one in inner:
            one.meta[_MOVED] = True
            one.name = self._free(one.name or "", self._nodes)
            for value in one.outputs:
                value.name = self._free(value.name or "", self._names) if value.name else value.name
        self._graph.insert_before(node, inner)

    @staticmethod
    def _free(name: str, taken: set[str]) -> str:
        found, number = name, 0
        while found in taken:
            number += 1
            found = f"{name}.{number}"
        taken.add(found)
        return found

    def _first_of_loop(self, node: ir.Node) -> list[ir.Value]:
        """What the body of a ``Loop`` gets in its first iteration."""
        condition = node.inputs[1] if len(node.inputs) > 1 else None
        true = condition if condition is not None else self._constant(node, np.array(True))
        return [self._constant(node, np.array(0)), true, *(value for value in node.inputs[2:] if value is not None)]

    def _first_of_scan(self, node: ir.Node, body: ir.Graph) -> list[ir.Value]:
        """What the body of a ``Scan`` gets in its first iteration."""
        values = [value for value in node.inputs if value is not None]
        scanned = node.attributes["num_scan_inputs"].as_int()
        states, sequences = values[: len(values) - scanned], values[len(values) - scanned :]
        axes, directions = (
            list(node.attributes[name].as_ints()) if name in node.attributes else [0] * scanned
            for name in ("scan_input_axes", "scan_input_directions")
        )
        for value, formal, axis, backwards in zip(sequences, body.inputs[len(states) :], axes, directions, strict=True):
            place = self._constant(node, np.array(-1 if backwards else 0))
            one = ir.Node("", "Gather", [value, place], [ir.Attr("axis", ir.AttributeType.INT, axis)])
            one.name = self._free(f"{node.name}.first", self._nodes)
            first = one.outputs[0]
            first.name = self._free(f"{value.name}.first", self._names)
            first.shape, first.type = typed_as(formal.shape, formal.type)
            self._graph.insert_before(node, one)
            states.append(first)
        return states

    def _constant(self, node: ir.Node, array: Any) -> ir.Value:
        name = self._free(f"{node.name}.constant", self._names)
        value = ir.val(name, const_value=ir.tensor(array, name=name))
        self._graph.register_initializer(value)
        return value


def _values_of(graph: ir.Graph) -> Iterator[ir.Value]:
    """The values that a graph and those nested in it define."""
    yield from graph.inputs
    yield from list(graph.initializers.values())
    for node in graph:
        yield from node.outputs
        for nested in nested_graphs(node):
            yield from _values_of(nested)

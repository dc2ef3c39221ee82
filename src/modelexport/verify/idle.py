"""Nodes that change nothing with the inputs that were tried: would they, and would that be right?

A node that cuts off what is never so large in any run, or adds what is zero there, shows in no value, and behind a
normalization inputs of the model do not reach further. So the calls around such nodes run with larger numbers, in
PyTorch and in the file. A node that changes something then is wrong if PyTorch's result is that without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.errors import UsageError
from modelexport.graph.copies import copy_of
from modelexport.graph.owners import owner_of
from modelexport.runtime import sessions
from modelexport.runtime.evidence import Evidence, SeenTensor
from modelexport.runtime.fingerprints import Fingerprint, fingerprint_of
from modelexport.verify.differences import UNMEASURED_UNITS, compare_arrays
from modelexport.verify.leading import MOVES
from modelexport.verify.matching import WHOLE_UNITS
from modelexport.verify.proof import Proof
from modelexport.verify.segments import GIVEN, segmented

_PASSING = frozenset({*MOVES, "Cast", "Dropout", "Identity", "Pad", "Reshape", "Transpose"})
"""Operators that move elements: what leaves them in their places does so whatever they are."""


@dataclass(frozen=True)
class _Trial:
    """A call with larger inputs, in PyTorch."""

    idle: Mapping[ir.Node, int]
    """Nodes in it that change nothing, to the place of the input that they pass on."""
    given: Mapping[str, Any]
    """Values that it gets, by their names in the file."""
    right: Mapping[str, Any]
    """Values that it returns."""


def wrong_idle_nodes(
    proof: Proof, run_larger: Callable[[Mapping[ModuleCall, Collection[str]], float], Evidence | None]
) -> dict[str, ModuleCall]:
    """Names of nodes that change nothing, but would, wrongly, to the calls that were run for that.

    Args:
        run_larger: Runs the model with larger numbers in some inputs of calls, given by their names, and of another
            root mean square unless that is zero; ``None`` if it does not run so.
    """
    around: dict[ModuleCall, dict[ir.Node, int]] = defaultdict(dict)
    known = _KnownValues(proof)
    for node, place in known.idle.items():
        call = known.call_around(node)
        if call is not None and _may_change(node, place, known.names_of_inputs(call)):
            around[call][node] = place
    found: dict[str, ModuleCall] = {}
    for typical in _SIZES if around else ():
        if not found and (larger := run_larger({call: known.inputs_of(call) for call in around}, typical)) is not None:
            for call, nodes in around.items():
                trial = known.trial(call, nodes, larger)
                found.update({node.name or "": call for node in _wrong(proof, trial)} if trial is not None else {})
    return found


_SIZES = (0.0, 16.0)
"""The root mean square of numbers that calls are tried with: that of the example, and a large one."""


class _KnownValues:
    """The values of a file that calls get and return."""

    def __init__(self, proof: Proof) -> None:
        self._proof = proof
        self._names: dict[str, list[str]] = defaultdict(list)
        self.idle = dict(_idle_nodes(proof))
        for name, content in (*proof.contents.items(), *_contents_of_inputs(proof)):
            if name not in proof.layouts and (name in proof.nodes or name in proof.feeds):
                self._names[content].append(name)
        self._seen: dict[ModuleCall, list[SeenTensor]] = defaultdict(list)
        for tensor in proof.evidence.tensors:
            self._seen[tensor.call].append(tensor)

    def call_around(self, node: ir.Node) -> ModuleCall | None:
        """The innermost call around a node that gets numbers of the file, and returns such that the node leads to.

        Not the root, which gets the inputs of the file.
        """
        owner, calls = owner_of(node), self._proof.tagged.calls
        stack = calls.stack(owner.call)[1:] if owner is not None and owner.call in calls else ()
        after = _values_after(node) if stack else set()
        return next((c for c in reversed(stack) if self.inputs_of(c) and not after.isdisjoint(self._returned(c))), None)

    def inputs_of(self, call: ModuleCall) -> list[str]:
        """The names of the tensors of numbers that a call gets and the file has."""
        return [t.name for t in self._seen[call] if t.side == "inputs" and self._is_known(t)]

    def names_of_inputs(self, call: ModuleCall) -> set[str]:
        """The names of these tensors in the file."""
        numbers = set(self.inputs_of(call))
        return {v for t in self._seen[call] if t.name in numbers and t.side == "inputs" for v in self._names[t.content]}

    def _returned(self, call: ModuleCall) -> list[str]:
        outputs = [t for t in self._seen[call] if t.side == "outputs" and self._is_known(t)]
        return [name for tensor in outputs for name in self._names[tensor.content]]

    def _is_known(self, tensor: SeenTensor) -> bool:
        return tensor.dtype.startswith(("float", "bfloat")) and tensor.content in self._names

    def trial(self, call: ModuleCall, nodes: Mapping[ir.Node, int], larger: Evidence) -> _Trial | None:
        """What a call gets and returns with larger inputs; ``None`` if the file does not have all that it gets."""
        now = {(t.side, t.name): t for t in larger.tensors if t.call == call}
        given: dict[str, Any] = {}
        right: dict[str, Any] = {}
        for tensor in self._seen[call]:
            its = now.get((tensor.side, tensor.name))
            if its is None or (its.dtype, its.shape) != (tensor.dtype, tensor.shape):
                return None
            names = self._names.get(tensor.content, [])
            array = larger.array(its.content).reshape(its.shape)
            if tensor.side == "outputs" and array.dtype.kind == "f" and np.isfinite(array).all():
                right.update((name, array) for name in names)
            elif tensor.side == "inputs":
                names = [name for name in names if self._proof.nodes.get(name) not in self.idle]
                if not names and its.content != tensor.content:
                    return None
                given.update((name, array) for name in names)
        shapes = self._proof.values.shapes
        given = {name: array.reshape(shapes[name]) for name, array in given.items()}
        right = {name: array.reshape(shapes[name]) for name, array in right.items()}
        return _Trial(nodes, given, right) if given and right else None


def _values_after(node: ir.Node) -> set[str]:
    """The names of what a node makes, and of all that depends on it."""
    pending, found = list(node.outputs), set[str]()
    while pending:
        value = pending.pop()
        if value.name not in found:
            found.add(value.name or "")
            pending.extend(made for user, _ in value.uses() for made in user.outputs)
    return found


def _contents_of_inputs(proof: Proof) -> Iterator[tuple[str, str]]:
    """The inputs of the file to the contents that the model got as its inputs."""
    root = proof.tagged.calls.calls[0].call
    for tensor in proof.evidence.tensors:
        if tensor.call == root and tensor.side == "inputs":
            array = proof.evidence.array(tensor.content).reshape(tensor.shape)
            yield from ((name, tensor.content) for name, its in proof.feeds.items() if np.array_equal(array, its))


def _wrong(proof: Proof, trial: _Trial) -> list[ir.Node]:
    """Those of the idle nodes without which the file gives what PyTorch does, if it does not with them."""
    cut = segmented(proof.tagged.model, trial.given, list(trial.right), proof.run.dtypes)

    def outputs(model: ir.Model) -> Mapping[str, Any]:
        session = sessions.open_session(model, folder=proof.tagged.path.parent, provider=proof.provider)
        feeds = {
            name: trial.given[one] if (one := name.removesuffix(GIVEN)) in trial.given else proof.feeds[name]
            for name in sessions.input_names(session)
        }
        return sessions.run_session(session, feeds)

    def agree(found: Mapping[str, Any], units: float) -> bool:
        compared = (compare_arrays(name, trial.right[name], array, units=units) for name, array in found.items())
        return all(one.status == "agree" for one in compared)

    try:
        found = outputs(cut)
        # The node makes an error that is larger by far than any that there is without it.
        allowed = [units for units in (UNMEASURED_UNITS, WHOLE_UNITS / _FAR) if not agree(found, units * _FAR)]
        if not allowed:
            return []
        for those in (*([node] for node in trial.idle), list(trial.idle)):
            without = outputs(_without(cut, {node: trial.idle[node] for node in those}))
            if any(agree(without, units) for units in allowed):
                return those
    except UsageError:  # it does not run with these numbers
        pass
    return []


_FAR = 8


def _without(model: ir.Model, idle: Mapping[ir.Node, int]) -> ir.Model:
    """A copy in which idle nodes give what they got."""
    copy, places = copy_of(model), {node.name: place for node, place in idle.items()}
    for node in [node for node in copy.graph if node.name in places]:
        made = node.outputs[0]
        same = ir.Node("", "Identity", [node.inputs[places[node.name]]], name=node.name)
        passed = same.outputs[0]
        passed.name, passed.type, passed.shape = made.name, made.type, made.shape
        copy.graph.insert_after(node, same)
        made.replace_all_uses_with(passed, replace_graph_outputs=True)
        copy.graph.remove(node)
    return copy


def _idle_nodes(proof: Proof) -> Iterator[tuple[ir.Node, int]]:
    """The nodes that compute with numbers and give an input as they got it, with the place of that input."""
    known: dict[str, Fingerprint] = dict(proof.run.prints)
    known.update((name, fingerprint_of(array)) for name, array in proof.feeds.items())
    shapes = {**{name: array.shape for name, array in proof.feeds.items()}, **proof.run.shapes}
    for node in proof.tagged.model.graph:
        made = node.outputs[0].name or "" if len(node.outputs) == 1 else ""
        own = known.get(made)
        if own is None or own.kind != "f" or (node.domain == "" and node.op_type in _PASSING):
            continue
        for place, value in enumerate(node.inputs):
            name = (value.name or "") if value is not None else ""
            if known.get(name) == own and shapes[name] == shapes[made]:
                yield node, place
                break


def _may_change(node: ir.Node, place: int, numbers: Collection[str]) -> bool:
    """Whether a node that passes an input on may change it if other numbers are larger.

    What adds zero, multiplies by one, or chooses by a condition, does so for all numbers unless one of them decides.
    """
    if node.domain != "" or node.op_type not in _NEUTRAL:
        return True
    deciding = node.inputs[:1] if node.op_type == "Where" else (*node.inputs[:place], *node.inputs[place + 1 :])
    pending, seen = list(deciding), set[ir.Node]()
    while pending:
        value = pending.pop()
        if value is None:
            continue
        if value.name in numbers:
            return True
        maker = value.producer()
        if maker is not None and maker not in seen and maker.op_type not in _OF_FINITE:
            seen.add(maker)
            pending.extend(maker.inputs)
    return False


_NEUTRAL = frozenset({"Add", "Div", "Mul", "Sub", "Where"})
"""Operators that pass on every number if they pass on some."""
_OF_FINITE = frozenset({"IsInf", "IsNaN"})
"""Operators that give one answer for all finite numbers."""

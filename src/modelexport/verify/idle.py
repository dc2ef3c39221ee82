"""Nodes that change nothing with the inputs that were tried: would they, and would that be right?

A node that cuts off what is never so large in any run, or adds what is zero there, shows in no value, and behind a
normalization inputs of the model do not reach further. So the tensors before such nodes get larger numbers, in PyTorch
and in the file, and all others stay as they were. A node that changes something then is wrong if what PyTorch computes
next is that without it. A node with bounds may have a wrong one that nothing reaches: it is wrong, too, if what PyTorch
computes next is something else by far. So it is where PyTorch bounds what no node of the file does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.errors import UsageError
from modelexport.runtime import sessions
from modelexport.runtime.evidence import Place, Replaced
from modelexport.runtime.fingerprints import Fingerprint, fingerprint_of, is_floating
from modelexport.runtime.kernels import run_in_double
from modelexport.surgery.repeating import values_taken
from modelexport.verify.differences import UNITS, UNMEASURED_UNITS, compare_arrays, is_rounding
from modelexport.verify.lost_bounds import nodes_beside_lost_bounds
from modelexport.verify.matching import WHOLE_UNITS
from modelexport.verify.proof import Proof
from modelexport.verify.segments import GIVEN, stretch
from modelexport.verify.stretches import PASSING, Stretches, certain_tensors, has_numbers, replaceable_tensors

Arrays = Mapping[str, Any]
RunReplaced = Callable[[Mapping[Place, Any], Collection[Place], bool], Replaced]


class WrongNode(NamedTuple):
    """A node that makes something else of larger numbers than PyTorch."""

    name: str
    lost: ModuleCall | None = None
    """The call that bounds what the node makes or takes, if it is not the node that is wrong but that the bound is
    missing."""


def wrong_idle_nodes(proof: Proof, run_replaced: RunReplaced, larger: Callable[[Any, float], Any]) -> list[WrongNode]:
    """Nodes that change nothing, but would, wrongly, and those beside bounds that are missing.

    Args:
        run_replaced: Runs the model with other tensors in some places, and gives what it computed in these and in
            others: nothing if it does not run so. With the last bits of all results changed at random, if asked for.
        larger: Spreads the numbers of an array; of another root mean square unless that is zero.
    """
    known = _Known(proof)
    idle, bounded = dict(known.idle_nodes()), known.bounded_nodes()
    lost = nodes_beside_lost_bounds(proof, bounded)
    replaceable = replaceable_tensors(proof) if idle or bounded or lost else {}
    idle = known.may_change(idle, {name for name, its in replaceable.items() if has_numbers(its)})
    tried: dict[ir.Node, int | None] = {**dict.fromkeys((*bounded, *lost)), **idle}
    if not tried:
        return []
    replaceable = certain_tensors(replaceable, idle, proof)
    stretches = Stretches(proof, replaceable, tried)
    if not stretches.ends:
        return []
    trial = _Trial(proof, stretches, tried, bounded, lost)
    right = {name: proof.right(name) for name in trial.given | stretches.replaced}
    for typical in _SIZES:
        given = {name: larger(one, typical) if name in stretches.spread else one for name, one in right.items()}
        others = {name: given[name].reshape(replaceable[name].shape) for name in given if name in replaceable}
        placed = {replaceable[name].place: array for name, array in others.items()}
        run_again = partial(run_replaced, placed, list(stretches.ends.values()))
        run = run_again(False)
        missing = {name for name in others if replaceable[name].place not in run.places}
        if found := trial.wrong(given, run, missing, partial(run_again, True)):
            return found
    return []


_SIZES = (0.0, 16.0)
"""The root mean square of numbers that nodes are tried with: that of the example, and a large one."""


class _Trial:
    """The part of a file between tensors that PyTorch replaces and values that are compared."""

    def __init__(
        self,
        proof: Proof,
        stretches: Stretches,
        tried: Mapping[ir.Node, int | None],
        bounded: Set[ir.Node],
        lost: Mapping[ir.Node, Collection[ModuleCall]],
    ) -> None:
        self._proof, self._stretches, self._tried, self._bounded, self._lost = proof, stretches, tried, bounded, lost
        self._sessions: dict[tuple[frozenset[str], frozenset[ir.Node]], sessions.Session] = {}
        self.given = stretches.part(stretches.ends)[1]
        """The names of the values that it gets."""

    def wrong(
        self, given: Arrays, run: Replaced, missing: Set[str], run_rounded: Callable[[], Replaced]
    ) -> list[WrongNode]:
        """The nodes without which the file gives what PyTorch does, if it does not with them; or those of bounds.

        Args:
            run: What PyTorch computed.
            missing: Values that it did not replace.
            run_rounded: Gives what it computes with other roundings.
        """
        right = self._ends(run)
        differing: dict[tuple[ir.Node, ...], list[str]] = defaultdict(list)
        for name, array in self._computed(list(right), given).items():
            # The node makes an error that is larger by far than any that there is without it.
            if not _agrees(right[name], array, _UNITS[0], _FAR) and missing.isdisjoint(self._stretches.part([name])[1]):
                nodes = tuple(node for node in self._stretches.before([name]) if node in self._tried)
                differing[nodes].append(name)
        accused = (self._accused(nodes, names, given, right, run_rounded) for nodes, names in differing.items())
        return list(dict.fromkeys(node for nodes in accused for node in nodes))

    def _ends(self, run: Replaced) -> Arrays:
        """Numbers that a run of PyTorch computed where the file does."""
        shapes = self._proof.run.shapes
        computed = {name: run.computed[place] for name, place in self._stretches.ends.items() if place in run.computed}
        return {
            name: array.reshape(shapes[name])
            for name, array in computed.items()
            if is_floating(array) and array.size == np.prod(shapes[name]) and np.isfinite(array).all()
        }

    def _accused(
        self,
        nodes: Sequence[ir.Node],
        names: Sequence[str],
        given: Arrays,
        right: Arrays,
        run_rounded: Callable[[], Replaced],
    ) -> Sequence[WrongNode]:
        """Those of the nodes before some values without which these are right, or with bounds that these are beyond."""

        def agree(found: Arrays, units: float, times: float = 1.0) -> bool:
            return found.keys() == set(names) and all(_agrees(right[name], found[name], units, times) for name in names)

        found = self._computed(names, given)
        allowed = [units for units in _UNITS if not agree(found, units, _FAR)]
        idle = [node for node in nodes if self._tried[node] is not None]
        for those in (*([node] for node in idle), *([idle] if idle else [])):
            without = self._computed(names, given, those)
            if any(agree(without, units) for units in allowed):
                return [WrongNode(node.name or "") for node in those]
        far = [name for name, array in found.items() if not _agrees(right[name], array, WHOLE_UNITS, _FAR)]
        exact = self._in_double(far, given) if far else {}
        far = [name for name in far if not is_rounding(right[name], found[name], exact.get(name))]
        if not far or self._may_be_chosen(far, nodes, given):
            return ()
        rounded = self._ends(run_rounded())
        if all(
            compare_arrays(name, right[name], found[name], exact=rounded.get(name)).status == "agree" for name in far
        ):
            return ()
        lost = {call: node for node in reversed(nodes) for call in self._lost.get(node, ())}
        return [
            *(WrongNode(node.name or "") for node in nodes if node in self._bounded),
            *(WrongNode(node.name or "", call) for call, node in lost.items()),
        ]

    def _may_be_chosen(self, names: Sequence[str], nodes: Collection[ir.Node], given: Arrays) -> bool:
        """Whether values may be what they are by how numbers were rounded, before some nodes or after them.

        Those before them decide alike with float64 kernels where rounding is not near a decision.
        """
        after, before = set(nodes), list[str]()
        for node in self._stretches.part(names)[0]:
            chooses = node.domain == "" and node.op_type in _CHOOSING
            if any(value is not None and value.producer() in after for value in values_taken(node)):
                if chooses:
                    return True
                after.add(node)
            elif chooses:
                before += [value.name or "" for value in node.outputs if value.name]
        found, exact = self._computed(before, given), self._in_double(before, given) if before else {}
        return any(
            name not in found or not np.array_equal(found[name], exact.get(name, found[name])) for name in before
        )

    def _in_double(self, names: Sequence[str], given: Arrays) -> Arrays:
        """Values computed with float64 kernels, where the runtime has them."""
        part = self._part(names)
        inputs = self._inputs([value.name or "" for value in part.graph.inputs], given)
        runs = run_in_double(part, self._proof.tagged.path.parent, inputs, self._proof.provider)
        return next((found for found, _ in runs), {})

    def _inputs(self, names: Sequence[str], given: Arrays) -> Arrays:
        feeds = self._proof.feeds
        return {name: given[name.removesuffix(GIVEN)] if name.endswith(GIVEN) else feeds[name] for name in names}

    def _computed(self, names: Sequence[str], given: Arrays, left_out: Sequence[ir.Node] = ()) -> dict[str, Any]:
        """Values of the file; without those that it does not compute from these numbers."""
        if not names:
            return {}
        try:
            session = self._session(names, left_out)
            return sessions.run_session(session, self._inputs(sessions.input_names(session), given))
        except UsageError:
            alone = ([name] for name in names if len(names) > 1)
            return {name: array for one in alone for name, array in self._computed(one, given, left_out).items()}

    def _session(self, names: Sequence[str], left_out: Sequence[ir.Node]) -> sessions.Session:
        key = frozenset(names), frozenset(left_out)
        if key not in self._sessions:
            part = self._part(names)
            places = {node.name or "": place for node in left_out if (place := self._tried[node]) is not None}
            _leave_out(part, places)
            folder = self._proof.tagged.path.parent
            self._sessions[key] = sessions.open_session(part, folder=folder, provider=self._proof.provider)
        return self._sessions[key]

    def _part(self, names: Sequence[str]) -> ir.Model:
        nodes, given = self._stretches.part(names)
        return stretch(self._proof.tagged.model, nodes, given, names, self._proof.run.dtypes)


_UNITS = (UNMEASURED_UNITS, WHOLE_UNITS / 8)
"""The errors in units up to which a value may be right."""
_FAR = 8
"""How many times these a value is off that is wrong."""
_COARSEST = 1 / 64
"""The share of a value's size that its error without a node may have: of narrow types, few units are more."""


def _agrees(right: Any, found: Any, units: float, times: float = 1.0) -> bool:
    """Whether a value is right up to some units, or times as many."""
    unit = UNITS.get(str(found.dtype), 0.0)
    allowed = min(units, _COARSEST / unit) if unit else units
    return compare_arrays("", right, found, units=allowed * times).status == "agree"


def _leave_out(model: ir.Model, places: Mapping[str, int]) -> None:
    """Make nodes give what they get, at these places."""
    for node in [node for node in model.graph if node.name in places]:
        made = node.outputs[0]
        same = ir.Node("", "Identity", [node.inputs[places[node.name or ""]]], name=node.name)
        passed = same.outputs[0]
        passed.name, passed.type, passed.shape = made.name, made.type, made.shape
        model.graph.insert_after(node, same)
        made.replace_all_uses_with(passed, replace_graph_outputs=True)
        model.graph.remove(node)


class _Known:
    """What the values of a file were in the run that compares the calls."""

    def __init__(self, proof: Proof) -> None:
        self._graph = proof.tagged.model.graph
        self._prints: dict[str, Fingerprint] = dict(proof.run.prints)
        self._prints.update((name, fingerprint_of(array)) for name, array in proof.feeds.items())
        self._shapes = {**{name: array.shape for name, array in proof.feeds.items()}, **proof.run.shapes}

    def idle_nodes(self) -> Iterator[tuple[ir.Node, int]]:
        """The nodes that compute with numbers and give an input as they got it, with the place of that input."""
        for node in self._graph:
            own = self._print_of(node)
            if own is None or own.kind != "f" or (node.domain == "" and node.op_type in PASSING):
                continue
            made = node.outputs[0].name or ""
            for place, value in enumerate(node.inputs):
                name = (value.name or "") if value is not None else ""
                if self._prints.get(name) == own and self._shapes[name] == self._shapes[made]:
                    yield node, place
                    break

    def bounded_nodes(self) -> set[ir.Node]:
        """The nodes with bounds that numbers may be beyond."""
        return {
            node
            for node in self._graph
            if node.domain == "" and node.op_type in _BOUNDING and (own := self._print_of(node)) and own.kind == "f"
        }

    def _print_of(self, node: ir.Node) -> Fingerprint | None:
        return self._prints.get(node.outputs[0].name or "") if len(node.outputs) == 1 else None

    def may_change(self, idle: Mapping[ir.Node, int], numbers: Collection[str]) -> dict[ir.Node, int]:
        """Those of the nodes that pass an input on that may change it if some numbers are larger.

        What adds zero, multiplies by one, or chooses by one condition, does so for all numbers unless one of them
        decides.
        """
        depending = _depending(self._graph, numbers)

        def decides(value: ir.Value | None) -> bool:
            return value is not None and (value.name in numbers or value.producer() in depending)

        found = {}
        for node, place in idle.items():
            others = node.inputs[:1] if node.op_type == "Where" else (*node.inputs[:place], *node.inputs[place + 1 :])
            if node.domain != "" or node.op_type not in _NEUTRAL or any(map(decides, others)):
                found[node] = place
        return found


def _depending(graph: ir.Graph, numbers: Collection[str]) -> set[ir.Node]:
    """The nodes that depend on some numbers by more than whether they are finite."""
    found = set[ir.Node]()
    for node in graph:
        if node.op_type not in _OF_FINITE and any(
            value.name in numbers or value.producer() in found for value in values_taken(node)
        ):
            found.add(node)
    return found


_BOUNDING = frozenset({"Clip", "HardSigmoid", "HardSwish", "Max", "Min", "Shrink", "ThresholdedRelu"})
"""Operators with bounds, or that choose the larger of two numbers."""
_CHOOSING = frozenset({"ArgMax", "ArgMin", "Ceil", "Floor", "Mod", "NonZero", "Round", "Sign", "TopK"})
"""Operators that rounding decides, where numbers are as many times as large as others."""
_NEUTRAL = frozenset({"Add", "Div", "Mul", "Sub", "Where"})
"""Operators that pass on every number if they pass on some."""
_OF_FINITE = frozenset({"IsInf", "IsNaN"})
"""Operators that give one answer for all finite numbers."""

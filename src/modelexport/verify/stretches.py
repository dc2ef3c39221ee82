"""Parts of a file between tensors that PyTorch can replace and values that these change."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice, takewhile
from math import prod

import onnx_ir as ir

from modelexport.core.calls import CallTree, ModuleCall
from modelexport.graph.owners import owner_of
from modelexport.runtime.evidence import SeenTensor
from modelexport.runtime.fingerprints import Index, fingerprint_of
from modelexport.surgery.repeating import values_taken
from modelexport.verify.bodies import calls_in_bodies
from modelexport.verify.leading import MOVES
from modelexport.verify.matching import returned_values
from modelexport.verify.proof import Proof


def replaceable_tensors(proof: Proof) -> dict[str, SeenTensor]:
    """Values to the tensors that they are, if all that uses them changes with these.

    A tensor is replaced where a call first returns it, and so for all that take it later, unless another call computes
    it again, or this one uses it, too; or where a call gets it, if the nodes that use it are of that call. Calls of
    modules that are also called in branches or loops have other numbers in a run that does not follow these.
    """
    root = proof.tagged.calls.calls[0].call
    first: dict[str, SeenTensor] = {}
    for tensor in proof.evidence.tensors:
        first.setdefault(tensor.content, tensor)
    found: dict[str, SeenTensor] = {}
    again, in_bodies = _computed_again(proof, first), {call.path for call in calls_in_bodies(proof.tagged)}
    for name, content in proof.contents.items():
        its, node = first.get(content), proof.nodes.get(name)
        if its is None or node is None or its.call == root or name in proof.layouts or name not in proof.run.prints:
            continue
        if content in again or its.call.path in in_bodies:
            continue
        told = has_numbers(its) or prod(its.shape) >= _TELLING
        if not told or proof.run.dtypes.get(name) != its.dtype:
            continue
        value = next(value for value in node.outputs if value.name == name)
        inside = [_is_in(user, its.call, proof.tagged.calls) for user, _ in value.uses()]
        # A call uses what it returns as it computes it, and not what replaces that for others.
        if not any(inside) if its.side == "outputs" else all(inside) and not value.is_graph_output():
            found[name] = its
    return found


def _computed_again(proof: Proof, first: Mapping[str, SeenTensor]) -> set[str]:
    """The contents that a call returns that neither got them nor has the call inside that did so first."""
    got = {(tensor.call, tensor.content) for tensor in proof.evidence.tensors if tensor.side == "inputs"}
    calls = proof.tagged.calls
    found = set()
    for tensor in proof.evidence.tensors:
        before = first[tensor.content].call
        inside = before in calls and tensor.call in calls.stack(before)
        if tensor.side == "outputs" and not inside and (tensor.call, tensor.content) not in got:
            found.add(tensor.content)
    return found


def certain_tensors(
    replaceable: Mapping[str, SeenTensor], idle: Collection[ir.Node], proof: Proof
) -> dict[str, SeenTensor]:
    """The replaceable tensors of which only one value has the numbers, but for what is moved from it.

    A value before a node that changes nothing has the numbers of that after it, and nothing tells which of them PyTorch
    replaces, unless one call returns it and another has that node. With the wrong one the file would do what PyTorch
    does not, or the other way round.

    Args:
        idle: Such nodes: what they give in another order is not told from it either.
    """
    alike = _Alike(proof)
    norms: dict[int, list[tuple[float, str]]] = defaultdict(list)
    made = {value.name or "": node for node in idle for value in node.outputs}
    for name in sorted(made, key=lambda name: proof.run.prints[name].norm):
        own = proof.run.prints[name]
        norms[own.size].append((own.norm, name))

    def is_after(other: str, its: SeenTensor) -> bool:
        """Whether it is what an idle node outside of the call makes of what the call returns."""
        owner = owner_of(made[other]) if other in made else None
        calls = proof.tagged.calls
        return (
            its.side == "outputs"
            and owner is not None
            and owner.call in calls
            and its.call not in calls.stack(owner.call)
        )

    def is_rearranged(name: str, its: SeenTensor) -> bool:
        own = proof.run.prints[name]
        those = norms[own.size]
        start = bisect_left(those, (own.norm * (1 - _SAME), ""))
        near = takewhile(lambda one: one[0] <= own.norm * (1 + _SAME), islice(those, start, None))
        return name in made or any(not is_after(other, its) for _, other in near)

    return {
        name: its
        for name, its in replaceable.items()
        if not is_rearranged(name, its) and alike.is_the_only(name, partial(is_after, its=its))
    }


_SAME = 1e-6
"""Up to here, in norms, one value may be another in another order."""
_ALIKE = 1e-5
"""Up to here, in norms, two values may have the same numbers, rounded in other steps."""


class _Alike:
    """The values of a file by their numbers."""

    def __init__(self, proof: Proof) -> None:
        self._proof, self._index = proof, Index[str]()
        self._prints = {**proof.run.prints, **{name: fingerprint_of(array) for name, array in proof.feeds.items()}}
        for name, own in self._prints.items():
            self._index.add(own, name)

    def is_the_only(self, name: str, is_after: Callable[[str], bool]) -> bool:
        """Whether all values with its numbers are moved from it, or come after it."""
        others = set(self._index.near(self._prints[name], _ALIKE)) - {name}
        return all(self._is_moved(other, others | {name}) or is_after(other) for other in others)

    def _is_moved(self, name: str, alike: Collection[str]) -> bool:
        """Whether a value is made of one of these by nothing but moves: there and back, for example."""
        pending, seen = [name], {name}
        while pending:
            maker = self._proof.nodes.get(pending.pop())
            if maker is not None and maker.domain == "" and maker.op_type in PASSING:
                taken = {value.name or "" for value in maker.inputs if value is not None}
                if not taken.isdisjoint(alike):
                    return True
                pending += taken - seen
                seen |= taken
        return False


PASSING = frozenset({*MOVES, "Cast", "Dropout", "Identity", "Pad", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators that move elements: what leaves them in their places does so whatever they are."""


def has_numbers(tensor: SeenTensor) -> bool:
    """Whether a tensor can be made larger: integers choose, and stay as they are."""
    return tensor.dtype.startswith(("float", "bfloat"))


_TELLING = 4
"""So many integers are not by chance those of another tensor; a size is that of many."""


def _is_in(node: ir.Node, call: ModuleCall, calls: CallTree) -> bool:
    """Whether a node is of a call, or of one inside it."""
    owner = owner_of(node)
    return owner is not None and owner.call in calls and call in calls.stack(owner.call)


class Stretches:
    """The nodes of a file between replaceable tensors before some nodes, and the next that these lead to.

    Every node is looked at once.

    Attributes:
        spread: The names of the nearest replaceable tensors that lead to one of the nodes.
        replaced: These, and the names of the next replaceable tensors after them, which stay as they were.
        ends: Names of the nearest values after the nodes that PyTorch shows, to where it does.
    """

    def __init__(self, proof: Proof, replaceable: Mapping[str, SeenTensor], nodes: Collection[ir.Node]) -> None:
        self._proof, self._replaceable = proof, replaceable
        taken = self._taken(_walk(nodes, self._makers))
        self.spread = {name for name in taken if name in replaceable and has_numbers(replaceable[name])}
        self._changing = self._changed()
        self.replaced = self.spread | {name for name in replaceable if proof.nodes[name] in self._changing}
        ends = {name: its.place for name, its in returned_values(proof.tagged, proof.evidence) if name in proof.nodes}
        shown = {**ends, **{name: its.place for name, its in replaceable.items()}}
        after = self._after(nodes)
        made = [value.name or "" for node in proof.tagged.model.graph if node in after for value in node.outputs]
        self.ends = {name: shown[name] for name in made if name in shown}

    def before(self, names: Collection[str]) -> dict[ir.Node, None]:
        """The nodes that values depend on and that change with the spread tensors, in the order of the file."""
        start = [self._proof.nodes[name] for name in names]
        found = _walk(start, lambda node: (one for one in self._makers(node) if one in self._changing))
        return dict.fromkeys(sorted(found, key=self._position))

    def part(self, names: Collection[str]) -> tuple[list[ir.Node], set[str]]:
        """The nodes that compute values, in order, and the names of what they are given: tensors that PyTorch has."""
        given: set[str] = set()

        def makers(node: ir.Node) -> Iterator[ir.Node]:
            for value in values_taken(node):
                maker = value.producer()
                if maker is not None and self._is_given(value, maker):
                    given.add(value.name or "")
                elif maker is not None:
                    yield maker

        found = _walk([self._proof.nodes[name] for name in names], makers)
        return sorted(found, key=self._position), given

    def _is_given(self, value: ir.Value, maker: ir.Node) -> bool:
        """Whether a value is replaceable, or does not change and is a tensor of PyTorch."""
        name = value.name or ""
        if name in self._replaceable or maker in self._changing or name not in self._proof.hints:
            return name in self._replaceable
        array = self._proof.evidence.array(self._proof.hints[name])
        return self._proof.run.dtypes.get(name) == str(array.dtype)

    def _changed(self) -> set[ir.Node]:
        """The nodes that change with the spread tensors."""
        found = set[ir.Node]()

        def changes(value: ir.Value) -> bool:
            name = value.name or ""
            return name in self.spread or (name not in self._replaceable and value.producer() in found)

        for node in self._proof.tagged.model.graph:
            if any(map(changes, values_taken(node))):
                found.add(node)
        return found

    def _after(self, nodes: Collection[ir.Node]) -> set[ir.Node]:
        """Those of some nodes that change, and the nodes that these lead to."""
        found = set[ir.Node]()
        for node in self._proof.tagged.model.graph:
            if node in self._changing and (node in nodes or any(maker in found for maker in self._makers(node))):
                found.add(node)
        return found

    def _makers(self, node: ir.Node) -> Iterator[ir.Node]:
        """The nodes that make what a node takes, but for replaceable tensors."""
        for value in values_taken(node):
            maker = value.producer()
            if maker is not None and value.name not in self._replaceable:
                yield maker

    def _taken(self, nodes: Collection[ir.Node]) -> set[str]:
        return {value.name or "" for node in nodes for value in values_taken(node)}

    def _position(self, node: ir.Node) -> int:
        return self._proof.positions[node.name or ""]


def _walk(nodes: Collection[ir.Node], makers: Callable[[ir.Node], Iterable[ir.Node]]) -> Mapping[ir.Node, None]:
    """Nodes, and those that they lead back to."""
    found = dict.fromkeys(nodes)
    pending = list(found)
    while pending:
        for maker in makers(pending.pop()):
            if maker not in found:
                found[maker] = None
                pending.append(maker)
    return found

"""Parts of a file between tensors that PyTorch can replace and values that these change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from math import prod

import onnx_ir as ir

from modelexport.core.calls import CallTree, ModuleCall
from modelexport.graph.owners import owner_of
from modelexport.graph.requested import requested_outputs
from modelexport.runtime.evidence import Place, SeenTensor
from modelexport.surgery.repeating import values_taken
from modelexport.verify.proof import Proof


def replaceable_tensors(proof: Proof, computing: Collection[ir.Node]) -> dict[str, SeenTensor]:
    """Values to the tensors that they are, if all that uses them changes with these.

    A tensor is replaced where a call first returns it, and so for all that take it later, unless another call computes
    it again; or where a call gets it, if the nodes that use it are of that call. Several values may have the same
    numbers: the first is the tensor, and the others follow from it, or are computed as it is.

    Args:
        computing: Nodes whose results have the numbers of another value by chance.
    """
    root = proof.tagged.calls.calls[0].call
    first: dict[str, SeenTensor] = {}
    for tensor in proof.evidence.tensors:
        first.setdefault(tensor.content, tensor)
    found: dict[str, SeenTensor] = {}
    seen = _computed_again(proof, first)
    contents = proof.contents
    for node in proof.tagged.model.graph:
        for value in node.outputs if node not in computing else ():
            name = value.name or ""
            content = contents.get(name, "")
            its = first.get(content)
            if its is None or content in seen:
                continue
            seen.add(content)
            alike = name not in proof.layouts and proof.run.dtypes.get(name) == its.dtype
            told = has_numbers(its) or prod(its.shape) >= _TELLING
            if alike and told and its.call != root and (its.side == "outputs" or _is_used_in(value, its, proof)):
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


def has_numbers(tensor: SeenTensor) -> bool:
    """Whether a tensor can be made larger: integers choose, and stay as they are."""
    return tensor.dtype.startswith(("float", "bfloat"))


_TELLING = 4
"""So many integers are not by chance those of another tensor; a size is that of many."""


def _is_used_in(value: ir.Value, its: SeenTensor, proof: Proof) -> bool:
    """Whether the nodes that use a value are all in the call that gets it."""
    users = (user for user, _ in value.uses())
    return not value.is_graph_output() and all(_is_in(user, its.call, proof.tagged.calls) for user in users)


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
        self._changing, changing = self._changed(inside=False), self._changed(inside=True)
        self.replaced = self.spread | {name for name in replaceable if proof.nodes[name] in changing}
        shown = {**_returned(proof), **{name: its.place for name, its in replaceable.items()}}
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

    def _changed(self, *, inside: bool) -> set[ir.Node]:
        """The nodes that change with the spread tensors.

        Args:
            inside: A call uses what it returns as it computes it, and not what replaces that for others.
        """
        found = set[ir.Node]()

        def changes(value: ir.Value, user: ir.Node) -> bool:
            its = self._replaceable.get(value.name or "")
            goes_on = its is None or (inside and _is_in(user, its.call, self._proof.tagged.calls))
            return value.name in self.spread or (goes_on and value.producer() in found)

        for node in self._proof.tagged.model.graph:
            if any(changes(value, node) for value in values_taken(node)):
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


def _returned(proof: Proof) -> dict[str, Place]:
    """The outputs of the file to those of the model."""
    root = proof.tagged.calls.calls[0].call
    returned = [tensor for tensor in proof.evidence.tensors if tensor.call == root and tensor.side == "outputs"]
    right = [t for t in requested_outputs(proof.tagged.model.metadata_props, returned) if 0 not in t.shape]
    values = [value.name or "" for value in proof.tagged.model.graph.outputs]
    if len(right) != len(values):
        return {}
    return {name: its.place for name, its in zip(values, right, strict=True) if name in proof.nodes}

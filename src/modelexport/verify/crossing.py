"""Nodes that cannot be in a call, by what crosses its boundary and by when it ran.

A call computes from what it gets, and from nothing else. A node that takes none of that, nor anything that the call
made of it, is not in the call if it makes what the call gets, or leads to nothing that the call returns. Nor is a node
that takes what was computed after the call had ended. This holds for nodes that only move elements, and for values of
a single number, which no other rule places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx_ir as ir

from modelexport.core.calls import CallTree, ModuleCall
from modelexport.core.owners import Evidence as OwnerEvidence
from modelexport.graph.owners import owner_of
from modelexport.runtime.evidence import Evidence, SeenTensor
from modelexport.verify.between import Between
from modelexport.verify.matching import FileRun, paths_called_as_often, tensors_by_call, tensors_of_calls

Calls = frozenset[ModuleCall]


def nodes_outside(
    model: ir.Model, calls: CallTree, run: FileRun, evidence: Evidence, computed: Mapping[ir.Node, Calls]
) -> Iterator[tuple[ir.Node, list[ModuleCall], Calls]]:
    """The nodes of the main graph that cannot be in some of their owners, with these and the calls that they may be in.

    Args:
        computed: The calls in which PyTorch computed the values of nodes that compute something.
    """
    boundaries = _Boundaries(model, calls, run, evidence, computed)
    latest = _Latest(model, calls, evidence, computed)
    between = Between(model, calls, run, computed)
    same = paths_called_as_often(calls, evidence)
    for node in model.graph:
        owner = owner_of(node)
        # What a tool merged has owners that need not have computed it.
        if owner is None or owner.evidence is not OwnerEvidence.EXACT:
            continue
        judged = [call for call in owner.calls if call.path in same]
        # What PyTorch computed in a call is of it, from whatever: a module may read what another one kept.
        judged = [call for call in judged if call not in computed.get(node, ())]
        wrong = [call for call in judged if boundaries.excludes(call, node) or latest.excludes(call, node)]
        around = {
            one: frozenset(other for other in between.excludes(one, node) if other.path in same)
            for one in judged
            if one not in wrong
        }
        wrong += [one for one, those in around.items() if those]
        if wrong:
            beside = [call for call in owner.calls if call not in wrong]
            yield (
                node,
                wrong,
                frozenset(beside) or frozenset().union(*around.values()) or frozenset(boundaries.owners_before(node)),
            )


class _Latest:
    """For every node the calls, of all before it, in which PyTorch computed something last.

    What a file computes once for several calls was there in the first of them, in whichever PyTorch shows it: in the
    others it may be a step inside an operation.
    """

    def __init__(self, model: ir.Model, calls: CallTree, evidence: Evidence, computed: Mapping[ir.Node, Calls]) -> None:
        self._calls = calls
        self._order = {call: index for index, call in enumerate(evidence.parents)}
        self._before: dict[ir.Node, Calls] = {}
        after: dict[ir.Node, Calls] = {}
        for node in model.graph:
            producers = (value.producer() for value in node.inputs if value is not None)
            known = [after[producer] for producer in producers if producer is not None and after.get(producer)]
            self._before[node] = max(known, key=self._first, default=frozenset())
            made, owner = computed.get(node, frozenset()), owner_of(node)
            shared = owner.calls if made and owner is not None and len(owner.calls) > 1 else ()
            own = frozenset(call for call in (*made, *shared) if call in self._order)
            after[node] = max(own, self._before[node], key=self._first) if own else self._before[node]

    def excludes(self, call: ModuleCall, node: ir.Node) -> bool:
        """Whether a node takes what was computed after a call had ended, in calls that began later and not in it."""
        before = self._before[node]
        return (
            bool(before)
            and call in self._order
            and self._first(before) > self._order[call]
            and all(one in self._calls and call not in self._calls.stack(one) for one in before)
        )

    def _first(self, calls: Calls) -> int:
        return min((self._order[call] for call in calls), default=-1)


class _Boundaries:
    def __init__(
        self, model: ir.Model, calls: CallTree, run: FileRun, evidence: Evidence, computed: Mapping[ir.Node, Calls]
    ) -> None:
        self._calls, self._run, self._evidence, self._computed = calls, run, evidence, computed
        gets, returns = tensors_by_call(evidence, "inputs"), tensors_by_call(evidence, "outputs")
        self._gets = {call: {tensor.content for tensor in gets.get(call, [])} for call in evidence.parents}
        self._returns = {call: {tensor.content for tensor in returns.get(call, [])} for call in evidence.parents}
        self._kinds = {t.content: _kind(t) for those in gets.values() for t in those}
        self._random = tensors_of_calls(evidence.random.tensors, "inputs")
        self._returning_random = set(tensors_of_calls(evidence.random.tensors, "outputs"))
        self._given = {t.content for call, those in gets.items() if evidence.parents[call] is None for t in those}
        """What the root gets."""
        self._values: dict[str, list[ir.Value]] = {}
        """Contents to the values that are them, in the order of the graph."""
        for node in model.graph:
            for value in node.outputs:
                if (content := self._content(value)) is not None:
                    self._values.setdefault(content, []).append(value)
        self._before: dict[ModuleCall, set[ir.Node]] = {}

    def excludes(self, call: ModuleCall, node: ir.Node) -> bool:
        """Whether a call cannot have made a node."""
        if call not in self._evidence.parents or self._evidence.parents[call] is None or call not in self._calls:
            return False
        taken = [value for value in node.inputs if value is not None and not value.is_initializer()]
        if not taken or any(self._is_within(call, value) for value in taken):
            return False
        apart = self._takes_nothing(call, taken)
        return apart or self._makes_input(call, node, taken) or self._leads_elsewhere(call, node)

    def owners_before(self, node: ir.Node) -> Iterator[ModuleCall]:
        """The owners of the nodes that a node takes values of."""
        for value in node.inputs:
            producer = value.producer() if value is not None else None
            owner = owner_of(producer) if producer is not None else None
            yield from owner.calls if owner is not None else ()

    def _is_within(self, call: ModuleCall, value: ir.Value) -> bool:
        """Whether a value may be at hand in a call: a tensor that it gets, what it made, or what nobody knows."""
        pending, seen = [value], {value}
        while pending:
            current = pending.pop()
            producer = current.producer()
            owner = owner_of(producer) if producer is not None else None
            own = self._run.prints.get(current.name or "")
            if producer is None or owner is None or own is None:
                return True
            if any(one in self._calls and call in self._calls.stack(one) for one in owner.calls):
                return True
            if self._run.contents.get(current.name or "") in self._gets[call]:
                return True
            if own.telling:
                continue
            # A few numbers may be at hand wherever what they are made of is.
            before = [one for one in producer.inputs if one is not None and not one.is_initializer()]
            if own.kind != "f" or not before or not self._is_complete(call):
                return True
            pending += [one for one in before if one not in seen]
            seen.update(before)
        return False

    def _is_complete(self, call: ModuleCall) -> bool:
        """Whether all that a call gets is in the file."""
        return call not in self._random and all(
            content in self._values or content in self._given for content in self._gets[call]
        )

    def _takes_nothing(self, call: ModuleCall, taken: list[ir.Value]) -> bool:
        """Whether values are none that a call gets, in any form.

        Each that PyTorch computed is not, if the file has all that the call gets. Of the kind of a tensor that the file
        does not have, a value may be that in another layout; so may one that PyTorch did not compute, made wrong by a
        fault. Numbers are never ids, though.
        """
        gets = self._gets[call]
        if not gets and not self._returns[call]:
            return False
        kinds = {self._kinds[one] for one in gets}
        unseen = {self._kinds[one] for one in gets if one not in self._values and one not in self._given}
        unseen |= set(map(_kind, self._random.get(call, ())))
        own = {value: self._run.prints[value.name or ""].kind for value in taken}
        return all(kind not in unseen and (kind not in kinds or self._is_known(value)) for value, kind in own.items())

    def _is_known(self, value: ir.Value) -> bool:
        """Whether PyTorch computed a value. If not, it may be what a call gets, made wrong by a fault."""
        return value.producer() in self._computed or self._content(value) is not None

    def _makes_input(self, call: ModuleCall, node: ir.Node, taken: list[ir.Value]) -> bool:
        """Whether a node is the first of the file to make what a call gets."""
        before = {self._content(value) for value in taken}
        for value in node.outputs:
            content = self._content(value)
            if content is None or content in before or content not in self._gets[call] - self._returns[call]:
                continue
            if self._values[content][0] is value:
                return True
        return False

    def _leads_elsewhere(self, call: ModuleCall, node: ir.Node) -> bool:
        """Whether all that a call returns is in the file, and computed without a node."""
        returned = self._returns[call]
        if not returned or call in self._returning_random or any(one not in self._values for one in returned):
            return False
        if call not in self._before:
            pending = [value.producer() for content in returned for value in self._values[content]]
            found: set[ir.Node] = set()
            while pending:
                current = pending.pop()
                if current is not None and current not in found:
                    found.add(current)
                    pending += [value.producer() for value in current.inputs if value is not None]
            self._before[call] = found
        return node not in self._before[call]

    def _content(self, value: ir.Value) -> str | None:
        """The tensor of PyTorch that a value is beyond doubt."""
        name = value.name or ""
        own = self._run.prints.get(name)
        if own is None or not own.telling or self._run.errors.get(name, 1.0) > _CLOSE:
            return None
        return self._run.contents.get(name)


_CLOSE = 2e-5


def _kind(tensor: SeenTensor) -> str:
    """The kind of a tensor's elements, as fingerprints name it."""
    return "f" if "float" in tensor.dtype else tensor.dtype

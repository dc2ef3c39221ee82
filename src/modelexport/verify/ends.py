"""Where calls begin and end in a file: what may be between the values that they get and return."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import onnx_ir as ir

from modelexport.core.calls import CallTree, ModuleCall
from modelexport.runtime.evidence import Evidence
from modelexport.verify.matching import FileRun, tensors_by_call


class Ends:
    """Where calls begin and end: the contents that they get and return, and which of these the file has."""

    def __init__(self, run: FileRun, evidence: Evidence) -> None:
        gets, returns = tensors_by_call(evidence, "inputs"), tensors_by_call(evidence, "outputs")
        self._known = evidence.parents
        self._shown = frozenset(run.contents.values())
        for call, around in evidence.parents.items():
            if around is None:  # what the root gets is the file's, too
                self._shown |= {tensor.content for tensor in gets.get(call, [])}
        self._get: dict[str, set[ModuleCall]] = defaultdict(set)
        self._return: dict[str, set[ModuleCall]] = defaultdict(set)
        self._first = {
            content: place for place, content in enumerate(dict.fromkeys(t.content for t in evidence.tensors))
        }
        self._given = {call: {tensor.content for tensor in tensors} for call, tensors in returns.items()}
        self._taken = {call: {tensor.content for tensor in tensors} for call, tensors in gets.items()}
        random = [(tensor.call, tensor.side) for tensor in evidence.random.tensors]
        self._returning_random = {call for call, side in random if side == "outputs"}
        self._taking_random = {call for call, side in random if side == "inputs"}
        self._open = {call for call, taken in self._taken.items() if not taken <= self._shown} | self._taking_random
        """The calls that get something that the file does not have."""
        for call in gets.keys() | returns.keys():
            given, returned = ({t.content for t in side.get(call, [])} for side in (gets, returns))
            for content in given - returned:
                self._get[content].add(call)
            for content in returned - given:
                self._return[content].add(call)

    def before(self, calls: Collection[ModuleCall]) -> set[ModuleCall]:
        """The calls that return what others get."""
        taken = {content for call in calls for content in self._taken.get(call, ())}
        return {call for content in taken for call in self._return.get(content, ())}

    def may_lead_to(self, call: ModuleCall, other: ModuleCall, calls: CallTree) -> bool:
        """Whether what a call computes can be on the way to a value of another, between that and what the file has.

        It can inside the other. From elsewhere it comes as what the other gets: not if all of that is in the file.
        """
        if call not in self._known or other not in self._known or (call in calls and other in calls.stack(call)):
            return True
        return other in self._open

    def meet(self, call: ModuleCall, right: Collection[ModuleCall], calls: CallTree, outside: Collection[str]) -> bool:
        """Whether what passes from a call to others, which compute a value, is in the file, so that no node does both.

        It passes everything that the calls around the first one return, and those around the others get, up to one
        around both: it is enough that one of these calls has all of it in the file, or that what the file lacks was
        there before what the node takes.

        Args:
            outside: The contents that the node takes, but for what was computed in the others.
        """
        if call not in self._known or call not in calls or any(one not in calls for one in right):
            return False
        return all(self._is_seen_between(calls.stack(call), calls.stack(one), outside) for one in right)

    def _is_seen_between(
        self, one: Sequence[ModuleCall], other: Sequence[ModuleCall], outside: Collection[str]
    ) -> bool:
        since = min((self._first.get(content, -1) for content in outside), default=len(self._first))

        def is_seen(content: str) -> bool:
            return content in self._shown

        def was_there(content: str) -> bool:
            return is_seen(content) or self._first[content] < since

        returned = (self._given.get(call, ()) for call in one if call not in {*other, *self._returning_random})
        taken = (self._taken.get(call, ()) for call in other if call not in {*one, *self._taking_random})
        return any(some and all(map(is_seen, some)) for some in returned) or any(
            some and all(map(was_there, some)) for some in taken
        )

    def apart_from(self, node: ir.Node, run: FileRun) -> set[ModuleCall]:
        """The calls that a node is not in: those that get what it gives, or return what it takes."""
        taken = (run.contents.get(value.name or "", "") for value in node.inputs if value is not None)
        given = (run.contents.get(value.name or "", "") for value in node.outputs)
        before = {call for content in given for call in self._get.get(content, ())}
        return before | {call for content in taken for call in self._return.get(content, ())}

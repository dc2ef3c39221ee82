"""What is known of each call, of all that the two runs of a file showed (:mod:`modelexport.verify.proving`)."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from modelexport.core.calls import ModuleCall
from modelexport.graph.owners import owner_of
from modelexport.tagged.file import TaggedFile
from modelexport.verify.differences import Difference, worst
from modelexport.verify.matching import tensors_by_call
from modelexport.verify.placement import Misplaced
from modelexport.verify.proof import Proof
from modelexport.verify.proving import same_calls
from modelexport.verify.verdicts import CallStatus, CallVerdict


def verdicts_of(proof: Proof, modules: Collection[ModuleCall] = ()) -> list[CallVerdict]:
    """What is known of every call of the file, or of ``modules`` and those inside them."""
    return _Verdicts(proof).of([t.call for t in proof.tagged.calls if _shown(proof.tagged, t.call, modules)])


def _shown(tagged: TaggedFile, call: ModuleCall, modules: Collection[ModuleCall]) -> bool:
    return not modules or not set(modules).isdisjoint(tagged.calls.stack(call))


class _Verdicts:
    def __init__(self, proof: Proof) -> None:
        self._proof = proof
        tagged = proof.tagged
        self._inside: set[ModuleCall] = set()
        self._counts: Counter[ModuleCall] = Counter()
        for node in tagged.nodes:
            if (owner := owner_of(node)) is not None:
                self._counts[owner.call] += 1
                self._inside.update(a for call in owner.calls if call in tagged.calls for a in tagged.calls.stack(call))
        self._gets = tensors_by_call(proof.evidence, "inputs")
        self._returns = tensors_by_call(proof.evidence, "outputs")
        self._same = set(same_calls(tagged, proof.evidence))
        self._values: dict[str, list[str]] = defaultdict(list)
        for name, content in proof.contents.items():
            self._values[content].append(name)
        self._wrong = self._blamed()
        self._first = self._first_nodes()
        self._own: dict[ModuleCall, list[Difference]] = defaultdict(list)
        for name, difference in proof.per_module.items():
            owner = owner_of(proof.nodes[name])
            for call in owner.calls if owner is not None else ():
                self._own[call].append(difference)

    def _blamed(self) -> dict[ModuleCall, list[Difference]]:
        """The calls whose nodes compute what differs."""
        blamed: dict[ModuleCall, list[Difference]] = defaultdict(list)
        for name, suspects in self._proof.suspects.items():
            for call in suspects.calls:
                blamed[call].append(self._proof.per_module[name])
        return blamed

    def _first_nodes(self) -> dict[ModuleCall, str]:
        """The first node of each call that is suspected of anything."""
        found: dict[ModuleCall, str] = {}
        self._lacking: set[ModuleCall] = set()
        positions = self._proof.positions

        def suspect(call: ModuleCall, node: str, lacking: bool = False) -> None:
            if call not in found or positions.get(node, 0) < positions.get(found[call], 0):
                found[call] = node
                self._lacking.discard(call)
                self._lacking.update([call] if lacking else [])

        for suspects in self._proof.suspects.values():
            for node in suspects.nodes:
                if (owner := owner_of(node)) is not None:
                    suspect(owner.call, node.name or "")
        for one in self._proof.misplaced:
            for call in one.given:
                suspect(call, one.node)
            for call in one.belongs:
                suspect(call, one.node, lacking=True)
        self._decides: dict[ModuleCall, str] = {}
        for node in self._proof.tagged.model.graph:
            owner = owner_of(node)
            if owner is not None and (node.name or "") in self._proof.wrong_decisions:
                self._decides.setdefault(owner.call, self._proof.wrong_decisions[node.name or ""])
                suspect(owner.call, node.name or "")
            for call in owner.calls if owner is not None else ():
                if call in self._proof.wrong_weights and any(v and v.is_initializer() for v in node.inputs):
                    suspect(call, node.name or "")
        return found

    def of(self, calls: Sequence[ModuleCall]) -> list[CallVerdict]:
        given, lacking = defaultdict(list), defaultdict(list)
        for one in self._proof.misplaced:
            for call in one.given:
                given[call].append(one)
            for call in one.belongs:
                lacking[call].append(one)
        return [self._verdict(call, given[call], lacking[call]) for call in calls]

    def _verdict(self, call: ModuleCall, given: list[Misplaced], lacking: list[Misplaced]) -> CallVerdict:
        compared = [
            self._proof.per_module[name]
            for tensor in self._returns.get(call, [])
            for name in self._values[tensor.content]
            if name in self._proof.per_module
        ]
        own = worst(self._wrong[call]) or worst([*self._own[call], *compared])
        chain = worst(
            [
                self._proof.run.differences[name]
                for tensor in self._returns.get(call, [])
                for name in self._values[tensor.content]
                if name in self._proof.run.differences
            ]
        )
        status, reason = self._status(call, given, lacking, compared)
        return CallVerdict(
            address=call.address,
            tag=self._proof.tagged.tags[call],
            status=status,
            reason=reason,
            nodes=self._counts[call],
            end_to_end=chain,
            per_module=own,
            first_node=self._first.get(call, "") if status == "differ" else "",
            position=self._proof.positions.get(self._first.get(call, "")) if status == "differ" else None,
            lacking=status == "differ" and call in self._lacking,
        )

    def _status(
        self, call: ModuleCall, given: list[Misplaced], lacking: list[Misplaced], compared: list[Difference]
    ) -> tuple[CallStatus, str]:
        if call in self._proof.wrong_weights:
            return "differ", self._proof.wrong_weights[call]
        if given:
            one = given[0]
            return "differ", f"the tags are wrong: {_count(given)} computed in {_names(one.belongs)}, {one.node} first"
        if lacking and self._lacks(call, lacking):
            one = lacking[0]
            return "differ", f"the tags are wrong: {_count(lacking)} given to {_names(one.given)}, {one.node} first"
        if self._wrong[call]:
            difference = worst(self._wrong[call])
            assert difference is not None
            return "differ", f"{difference.name}: {difference.reason}"
        if call in self._decides:
            return "differ", self._decides[call]
        if call not in self._inside:
            return "no nodes", ""
        seen = worst([*compared, *self._own[call]])
        if seen is not None:
            return (seen.status, f"{seen.name}: {seen.reason}") if seen.status != "agree" else ("agree", "")
        return "not compared", self._unseen(call)

    def _lacks(self, call: ModuleCall, lacking: list[Misplaced]) -> bool:
        """Whether the nodes can only be its own."""
        return any(one.belongs == (call,) for one in lacking)

    def _unseen(self, call: ModuleCall) -> str:
        if call not in self._proof.evidence.parents:
            return (
                "PyTorch's run has no such call: it is inside a branch that cannot run with these inputs, "
                "or its module runs differently when exported"
            )
        if call not in self._same:
            return "PyTorch calls its module a different number of times than the file"
        if not self._returns.get(call):
            return "it returns no tensor"
        return "none of the tensors that it returns is a value of the file: there they have another layout or type"


def _count(misplaced: list[Misplaced]) -> str:
    return f"{len(misplaced)} of its nodes {'is' if len(misplaced) == 1 else 'are'}"


def _names(calls: Sequence[ModuleCall]) -> str:
    return ", ".join(map(str, calls[:3])) + (" ..." if len(calls) > 3 else "")


def sampled_calls(tagged: TaggedFile, count: int, *, seed: int = 0) -> list[ModuleCall]:
    """Some of the calls that own nodes, in the order in which they began; all if there are no more than ``count``."""
    owning = {call for node in tagged.nodes if (owner := owner_of(node)) is not None for call in owner.calls}
    calls = [traced.call for traced in tagged.calls if traced.call in owning]
    chosen = set(random.Random(seed).sample(range(len(calls)), min(count, len(calls))))
    return [call for index, call in enumerate(calls) if index in chosen]

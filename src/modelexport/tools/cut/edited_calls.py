"""The calls of a file while modules in it are replaced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from modelexport.core.calls import CallTree, ModuleCall, TracedCall
from modelexport.core.tags import CallFacts, RecordedTags, tag_segments, tag_suffixes


class NewCall(NamedTuple):
    """A call that is added inside another."""

    path: str
    """The path of its module in the whole model."""
    parent: int | None
    """The place of its caller in the list of new calls; ``None`` for the call that they are put into."""
    class_name: str
    level: bool


class EditedCalls:
    """The calls of a file, to which calls can be added, and from which they can be removed."""

    def __init__(self, tags: RecordedTags) -> None:
        self.tags = tags
        """The calls as they are now."""
        self._new: set[ModuleCall] = set()
        """Calls of new modules, with those that were there before and became such."""

    def remove_inside(self, call: ModuleCall, used: Iterable[ModuleCall]) -> None:
        """Remove the calls inside a call, except new ones, those that still own a node, and the callers of these."""
        tree = self.tags.calls
        kept = {above for other in (*used, *self._new) if other in tree for above in tree.stack(other)}
        gone = tree.inside(call) - kept - {call}
        self.tags = RecordedTags(CallTree(tuple(each for each in tree if each.call not in gone)), self.tags.facts)

    def graft(
        self, call: ModuleCall, class_name: str, *, level: bool, inside: Sequence[NewCall]
    ) -> tuple[ModuleCall, ...]:
        """Let a call be one of a module of another class, and add calls inside it; returns these.

        A call that remained inside it, because it owns other nodes too, becomes the new one of the same module, or
        keeps its place below it. All other calls keep their tags.
        """
        before = self.tags
        remaining = [each for each in before.calls if call in before.calls.stack(each.call)[:-1]]
        calls, added = self._with_new(call, inside, remaining)
        if any(each.call not in added for each in remaining):
            level = before.is_level_call(call)
        changed = (class_name, level) != (before.class_of(call), before.is_level_call(call))
        facts = {**before.facts, call: CallFacts(class_name, level, before.segments[call])}
        facts |= {name: CallFacts(new.class_name, new.level, "") for name, new in zip(added, inside, strict=True)}
        after = RecordedTags(CallTree(tuple(calls)), facts)
        based = [(base, extending) for extending, base in after.bases.items() if base is not None]
        placed = [(base.path, after.class_of(extending), extending.path) for base, extending in based]
        segments = tag_segments(after.bases, after.class_of, tag_suffixes(placed))
        for named in (*([call] if changed else []), *added):
            base = after.bases[named]
            taken = {facts[other].segment for other, its in after.bases.items() if its == base and other != named}
            tried = [segments[named], *(f"{segments[named]}@{number}" for number in range(1, len(taken) + 1))]
            facts[named] = facts[named]._replace(segment=next(segment for segment in tried if segment not in taken))
        self._new.update(added)
        self.tags = RecordedTags(after.calls, facts)
        return added

    def _with_new(
        self, call: ModuleCall, inside: Sequence[NewCall], remaining: Sequence[TracedCall]
    ) -> tuple[list[TracedCall], tuple[ModuleCall, ...]]:
        """The calls with new ones after all that are inside a call; a call of the same module becomes the new one."""
        calls = {each.call: each for each in self.tags.calls}
        added: list[TracedCall] = []
        for new in inside:
            parent = calls[call] if new.parent is None else added[new.parent]
            there = [each.call for each in remaining if (each.call.path, each.parent) == (new.path, parent.call)]
            taken = {each.call for each in added}
            index = 0
            while ModuleCall(new.path, index) in calls:
                index += 1
            name = next((each for each in there if each not in taken), ModuleCall(new.path, index))
            added.append(TracedCall(name, parent.call, parent.depth + 1, None, None))
            calls[name] = added[-1]
        names = {each.call for each in added}
        old = [each for each in self.tags.calls if each.call not in names]
        last = max(place for place, each in enumerate(old) if call in self.tags.calls.stack(each.call))
        return [*old[: last + 1], *added, *old[last + 1 :]], tuple(each.call for each in added)

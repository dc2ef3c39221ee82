"""The calls and tags of a file while modules in it are replaced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from modelexport.core.calls import CallTree, ModuleCall, TracedCall
from modelexport.core.tags import class_in_tag, shortest_tails
from modelexport.format import keys
from modelexport.format.call_tree import call_tree_entries, encode_call_tree
from modelexport.tagged.file import TaggedFile


class NewCall(NamedTuple):
    """A call that is added inside another."""

    path: str
    """The path of its module in the whole model."""
    parent: int | None
    """The place of its caller in the list of new calls; ``None`` for the call that they are put into."""
    class_name: str
    level: bool


class EditedTags:
    """The call tree of a file and the tags of its calls, to which calls can be added and removed."""

    def __init__(self, tagged: TaggedFile) -> None:
        self._calls = {traced.call: traced for traced in tagged.calls}
        self._tags = dict(tagged.tags)
        self._sources = dict(tagged.source_tags)
        self.renamed: set[ModuleCall] = set()
        """Calls that were there before and have another tag now."""
        self._new: set[ModuleCall] = set()
        """Calls of new modules, with those that were there before and became such."""
        for call in tagged.tags:
            self._sources.setdefault(call, self._guess(tagged, call))
        self._classes = {call: class_in_tag(tag) for call, tag in self._tags.items()}
        self._levels = {call: self._sources[call] == tag for call, tag in self._tags.items()}

    def _guess(self, tagged: TaggedFile, call: ModuleCall) -> str:
        """The source tag of a call without nodes of its own: its own tag if it is a level, otherwise the level above's.

        It is a level if the tags of the nodes inside it begin with its own.
        """
        own = tagged.tags[call]
        for node in tagged.nodes_of(call):
            source = node.metadata_props.get(keys.SOURCE_MODULE, "")
            if source.startswith((f"{own}/", f"{own}@")) or source == own:
                return own
        parent = self._calls[call].parent
        return own if parent is None else self._sources.get(parent) or self._guess(tagged, parent)

    @property
    def calls(self) -> CallTree:
        return CallTree(tuple(self._calls.values()))

    def tag(self, call: ModuleCall) -> str:
        return self._tags[call]

    def namespace(self, call: ModuleCall) -> str:
        return self._tags[call].removeprefix("/")

    def source_tag(self, call: ModuleCall) -> str:
        return self._sources[call]

    def class_of(self, call: ModuleCall) -> str:
        return self._classes[call]

    def is_level(self, call: ModuleCall) -> bool:
        return self._levels[call]

    def remove_inside(self, call: ModuleCall, used: Iterable[ModuleCall]) -> None:
        """Remove the calls inside a call, except those that still own a node and their callers."""
        tree = self.calls
        kept = {above for other in used if other in self._calls for above in tree.stack(other)}
        for each in tree.inside(call) - kept - {call}:
            for facts in (self._calls, self._tags, self._sources, self._classes, self._levels):
                del facts[each]

    def remove_old(self, call: ModuleCall, used: Iterable[ModuleCall]) -> None:
        """Remove the calls inside a replaced call that remained of the old module and own no node any more."""
        self.remove_inside(call, (*used, *self._new))

    def graft(
        self, call: ModuleCall, class_name: str, *, level: bool, inside: Sequence[NewCall]
    ) -> tuple[ModuleCall, ...]:
        """Let a call be one of a module of another class, and add calls inside it; returns these.

        A call that remained inside it, because it owns other nodes too, becomes the new one of the same module, or
        keeps its place below it. All other calls keep their tags.
        """
        tree, old = self.calls, self._tags[call]
        remaining = [each.call for each in tree if call in tree.stack(each.call)[:-1]]
        claimed = self._claimed(call, inside, remaining)
        if remaining := [each for each in remaining if each not in claimed.values()]:
            level = self.is_level(call)
        changes = (class_name, level) != (self.class_of(call), self.is_level(call))
        self._classes[call], self._levels[call] = class_name, level
        added = self._add(call, inside, claimed)
        self._new.update(added)
        self.renamed.update(claimed.values())
        siblings = self._siblings()
        if changes:
            tag = self._tag(call, siblings)
            self._set(call, tag)
            for each in remaining:
                self._tags[each] = _moved(self._tags[each], old, tag)
                self._sources[each] = _moved(self._sources[each], old, tag)
            self.renamed.update([call, *remaining])
        for each in added:
            self._set(each, self._tag(each, siblings))
        return added

    def _claimed(
        self, call: ModuleCall, inside: Sequence[NewCall], remaining: Sequence[ModuleCall]
    ) -> dict[int, ModuleCall]:
        """Places of new calls to calls of the same module by the same caller that are there already."""
        found: dict[int, ModuleCall] = {}
        for place, new in enumerate(inside):
            parent = call if new.parent is None else found.get(new.parent)
            for each in remaining:
                if each.path == new.path and self._calls[each].parent == parent and each not in found.values():
                    found[place] = each
                    break
        return found

    def _add(
        self, call: ModuleCall, inside: Sequence[NewCall], claimed: Mapping[int, ModuleCall]
    ) -> tuple[ModuleCall, ...]:
        """Add calls after all that are inside a call, without tags."""
        tree = self.calls
        last = [each.call for each in tree if call in tree.stack(each.call)][-1]
        before: dict[ModuleCall, TracedCall] = {}
        for key, traced in self._calls.items():
            before[key] = traced
            if key == last:
                break
        after = {key: traced for key, traced in self._calls.items() if key not in before}
        added: list[ModuleCall] = []
        for place, new in enumerate(inside):
            index = 0
            while ModuleCall(new.path, index) in before or ModuleCall(new.path, index) in after:
                index += 1
            parent = call if new.parent is None else added[new.parent]
            added.append(claimed.get(place, ModuleCall(new.path, index)))
            before.pop(added[-1], None)
            before[added[-1]] = TracedCall(added[-1], parent, before[parent].depth + 1, None, None)
            self._classes[added[-1]], self._levels[added[-1]] = new.class_name, new.level
        self._calls = before | after
        return tuple(added)

    def _set(self, call: ModuleCall, tag: str) -> None:
        taken, number, unique = {text for each, text in self._tags.items() if each != call}, 1, tag
        while unique in taken:
            unique = f"{tag}@{number}"
            number += 1
        parent = self._calls[call].parent
        self._tags[call] = unique
        self._sources[call] = unique if self._levels[call] or parent is None else self._sources[parent]

    def _base(self, call: ModuleCall) -> ModuleCall | None:
        """The call whose tag a call's tag extends: the level above for a level, otherwise the caller."""
        above = self._calls[call].parent
        while self._levels[call] and above is not None and not self._levels[above]:
            above = self._calls[above].parent
        return above

    def _siblings(self) -> Mapping[tuple[ModuleCall | None, str], list[ModuleCall]]:
        """The calls of one class on one base, in their order."""
        found: dict[tuple[ModuleCall | None, str], list[ModuleCall]] = {}
        for call in self._calls:
            found.setdefault((self._base(call), self._classes[call]), []).append(call)
        return found

    def _tag(self, call: ModuleCall, siblings: Mapping[tuple[ModuleCall | None, str], list[ModuleCall]]) -> str:
        """The tag of a call by the grammar of tags."""
        base, class_name = self._base(call), self._classes[call]
        if base is None:
            return f"/{class_name}"
        beside = siblings[base, class_name]
        paths = list(dict.fromkeys(each.path for each in beside))
        tail = shortest_tails(base.path, paths)[paths.index(call.path)]
        number = [each for each in beside if each.path == call.path].index(call)
        return f"{self._tags[base]}/{class_name}{f'.{tail}' if tail else ''}{f'@{number}' if number else ''}"

    def entries(self) -> str:
        """The call tree, as stored in a file."""
        return encode_call_tree(call_tree_entries(self._calls.values(), self.tag))


def _moved(tag: str, old: str, new: str) -> str:
    """A tag at or below another, which has changed."""
    return new + tag.removeprefix(old) if tag == old or tag.startswith((f"{old}/", f"{old}@")) else tag

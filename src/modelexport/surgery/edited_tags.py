"""The calls and tags of a file while modules in it are replaced."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from modelexport.core.calls import CallTree, ModuleCall, TracedCall
from modelexport.core.tags import class_in_tag
from modelexport.format import documents, keys
from modelexport.tagged.file import TaggedFile


class EditedTags:
    """The call tree of a file and the tags of its calls, to which calls can be added and removed."""

    def __init__(self, tagged: TaggedFile) -> None:
        self._calls = {traced.call: traced for traced in tagged.calls}
        self._tags = dict(tagged.tags)
        self._sources = dict(tagged.source_tags)
        for call in tagged.tags:
            self._sources.setdefault(call, self._guess(tagged, call))

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
        return class_in_tag(self._tags[call])

    def remove_inside(self, call: ModuleCall, used: Iterable[ModuleCall]) -> None:
        """Remove the calls inside a call, except those that still own a node and their callers."""
        tree = self.calls
        kept = {above for other in used if other in self._calls for above in tree.stack(other)}
        for traced in tree:
            if call in tree.stack(traced.call)[:-1] and traced.call not in kept:
                del self._calls[traced.call], self._tags[traced.call], self._sources[traced.call]

    def add(self, path: str, parent: ModuleCall, tag: str, source: str) -> ModuleCall:
        """Add a call of the module at a path, after all calls inside its parent; returns it with its number."""
        index = 0
        while ModuleCall(path, index) in self._calls:
            index += 1
        call = ModuleCall(path, index)
        taken = set(self._tags.values())
        number, unique = 1, tag
        while unique in taken:
            unique = f"{tag}@{number}"
            number += 1
        depth = self._calls[parent].depth + 1
        self._tags[call] = unique
        self._sources[call] = unique if source == tag else source
        items: dict[ModuleCall, TracedCall] = {}
        tree = self.calls
        last = [each.call for each in tree if parent in tree.stack(each.call)][-1]
        for key, traced in self._calls.items():
            items[key] = traced
            if key == last:
                items[call] = TracedCall(call, parent, depth, None, None)
        self._calls = items
        return call

    def entries(self) -> str:
        """The call tree, as stored in a file."""
        entries = [
            documents.CallTreeEntry(
                traced.call.address,
                self._tags[traced.call],
                None if traced.parent is None else traced.parent.address,
            )
            for traced in self._calls.values()
        ]
        return msgspec.json.encode(entries).decode()

"""The calls of a tagged file, as its model has them as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from modelexport.core.calls import CallTree, ModuleCall, TracedCall
from modelexport.core.json_decoding import decode_json
from modelexport.core.limits import CALL_DEPTH
from modelexport.core.tags import CallFacts, CallTags, RecordedTags
from modelexport.format import documents


def call_tree_entries(tags: CallTags) -> list[documents.CallTreeEntry]:
    """Every call with its tag, what the tag is made of, and the call it ran in."""
    return [
        documents.CallTreeEntry(
            call=traced.call.address,
            tag=tags.tag(traced.call),
            parent=None if traced.parent is None else traced.parent.address,
            class_name=tags.class_of(traced.call),
            level=tags.is_level_call(traced.call),
        )
        for traced in tags.calls
    ]


def encode_call_tree(entries: Sequence[documents.CallTreeEntry]) -> str:
    """Encode the calls as the model property that :func:`read_call_tree` reads."""
    return msgspec.json.encode(entries).decode()


def read_call_tree(text: str) -> dict[TracedCall, documents.CallTreeEntry]:
    """Every call, with what the file records of it.

    Raises:
        LookupError, ValueError: It is damaged.
    """
    entries = decode_json(text, kind=list[documents.CallTreeEntry])
    if not entries:
        raise ValueError("the call tree is empty")
    calls: dict[ModuleCall, TracedCall] = {}
    for entry in entries:
        call = parse_call(entry.call)
        if (entry.parent is None) is not (not calls):
            raise ValueError(f"the first call is '{call}', not the root, or the root is not first")
        if not entry.tag.startswith("/") or "\0" in entry.tag:
            raise ValueError(f"the call '{call}' has an invalid tag: {entry.tag!r}")
        parent = None if entry.parent is None else parse_call(entry.parent)
        depth = 0 if parent is None else calls[parent].depth + 1
        if depth > CALL_DEPTH:
            raise ValueError(f"calls are nested more than {CALL_DEPTH} deep")
        calls[call] = TracedCall(call, parent, depth, None, None)
    if len({entry.tag for entry in entries}) < len(entries):
        raise ValueError("two calls have the same tag")
    return dict(zip(calls.values(), entries, strict=True))


def recorded_tags(entries: Mapping[TracedCall, documents.CallTreeEntry]) -> RecordedTags:
    """The tags of the calls of a file."""
    of_calls: dict[ModuleCall, str] = {}
    of_levels: dict[ModuleCall, str] = {}
    facts: dict[ModuleCall, CallFacts] = {}
    for traced, entry in entries.items():
        call, tag, parent = traced.call, entry.tag, traced.parent
        above = "" if parent is None else (of_levels if entry.level else of_calls)[parent]
        of_calls[call], of_levels[call] = tag, tag if entry.level or parent is None else of_levels[parent]
        segment = tag.removeprefix(f"{above}/") if tag.startswith(f"{above}/") else tag
        facts[call] = CallFacts(entry.class_name, entry.level, segment)
    return RecordedTags(CallTree(tuple(entries)), facts)


def parse_call(address: str) -> ModuleCall:
    """The call that an address names; the address must be in canonical form.

    Raises:
        ValueError: It is not in canonical form.
    """
    call = ModuleCall.parse(address)
    if call.address != address:
        raise ValueError(f"{address!r} is not the address of a call")
    return call

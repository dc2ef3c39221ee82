"""The calls of a tagged file, read from the properties of its model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from modelexport.core.calls import CallTree, ModuleCall, TracedCall
from modelexport.core.json_decoding import decode_json
from modelexport.core.limits import CALL_DEPTH
from modelexport.format import documents, keys
from modelexport.format.repeated_calls import unfold_repeats


def call_tree_entries(calls: Iterable[TracedCall], tag: Callable[[ModuleCall], str]) -> list[documents.CallTreeEntry]:
    """Every call with its tag and the call it ran in."""
    return [
        documents.CallTreeEntry(
            traced.call.address, tag(traced.call), None if traced.parent is None else traced.parent.address
        )
        for traced in calls
    ]


def encode_call_tree(entries: Sequence[documents.CallTreeEntry]) -> str:
    """Encode the calls as the model property that :func:`read_call_tree` reads."""
    return msgspec.json.encode(entries).decode()


def read_call_tree(properties: Mapping[str, str]) -> tuple[CallTree, dict[ModuleCall, str]]:
    """Every call, and the tag of each.

    Raises:
        LookupError, ValueError: The properties are damaged.
    """
    entries = unfold_repeats(decode_json(properties[keys.CALL_TREE], kind=list[documents.CallTreeEntry]))
    if not entries:
        raise ValueError("the call tree is empty")
    calls: dict[ModuleCall, TracedCall] = {}
    tags: dict[ModuleCall, str] = {}
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
        tags[call] = entry.tag
    if len(set(tags.values())) < len(tags):
        raise ValueError("two calls have the same tag")
    return CallTree(tuple(calls.values())), tags


def parse_call(address: str) -> ModuleCall:
    """The call that an address names; the address must be in canonical form.

    Raises:
        ValueError: It is not in canonical form.
    """
    call = ModuleCall.parse(address)
    if call.address != address:
        raise ValueError(f"{address!r} is not the address of a call")
    return call

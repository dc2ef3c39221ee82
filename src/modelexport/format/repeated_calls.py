"""Call trees in which the calls inside equal calls are written once, as earlier versions wrote those of functions.

Of 24 equal layers the first has all calls inside it, and each of the others is one entry that names the call that it
is ``like``: the addresses and tags inside it differ from those of that call only in their prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import msgspec

from modelexport.core.limits import CALL_TREE_CHARACTERS, MOST_CALLS
from modelexport.format.documents import CallTreeEntry


def unfold_repeats(entries: Sequence[CallTreeEntry]) -> list[CallTreeEntry]:
    """Every call, parents before children, each once.

    Raises:
        KeyError: A call is like a call, or ran in a call, that does not come before it.
        ValueError: A call is listed twice, or there are more calls or characters than the limits allow.
    """
    children: dict[str, list[CallTreeEntry]] = {}
    by_call: dict[str, CallTreeEntry] = {}
    unfolded: list[CallTreeEntry] = []
    characters = 0
    for entry in entries:
        plain = msgspec.structs.replace(entry, like=None)
        added: Iterable[CallTreeEntry] = [plain]
        if entry.like is not None:
            inside = _calls_inside(entry.like, children)
            if len(unfolded) + len(inside) > MOST_CALLS:
                raise ValueError(f"there are more than {MOST_CALLS:,} calls")
            added = chain(added, _moved(inside, by_call[entry.like], plain))  # made one by one: limits end it
        for new in added:
            if new.call in by_call:
                raise ValueError(f"the call '{new.call}' is listed twice")
            if new.parent is not None and new.parent not in by_call:
                raise KeyError(f"'{new.call}' ran in '{new.parent}', which is not a call before it")
            by_call[new.call] = new
            if new.parent is not None:
                children.setdefault(new.parent, []).append(new)
            characters += len(new.call) + len(new.tag)
            if characters > CALL_TREE_CHARACTERS:
                raise ValueError(f"the addresses and tags have more than {CALL_TREE_CHARACTERS:,} characters")
            unfolded.append(new)
    return unfolded


def _calls_inside(call: str, children: Mapping[str, Sequence[CallTreeEntry]]) -> list[CallTreeEntry]:
    """The calls inside a call, each followed by those inside it."""
    inside: list[CallTreeEntry] = []
    pending = list(reversed(children.get(call, ())))
    while pending:
        entry = pending.pop()
        inside.append(entry)
        pending.extend(reversed(children.get(entry.call, ())))
    return inside


def _moved(inside: Iterable[CallTreeEntry], source: CallTreeEntry, target: CallTreeEntry) -> Iterator[CallTreeEntry]:
    """The entries of the calls inside ``source``, renamed to be inside ``target``."""

    def moved(address: str) -> str:
        if address == source.call:
            return target.call
        below = address.removeprefix(f"{source.call}.")
        return address if below == address else f"{target.call}.{below}"

    return (
        msgspec.structs.replace(
            entry,
            call=moved(entry.call),
            tag=target.tag + entry.tag.removeprefix(source.tag) if entry.tag.startswith(source.tag) else entry.tag,
            parent=moved(entry.parent or ""),
        )
        for entry in inside
    )

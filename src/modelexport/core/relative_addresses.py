"""Addresses and tags relative to a call, for the nodes of a function body that several calls share.

``attention.self`` is the first call of that module inside the call, and ``attention.self@1`` its second call there,
independent of their numbers in the whole run. The call itself is ``.``. A module outside the call's module (a shared
one) is written with its whole path after a slash: ``/shared``. A relative tag is the rest of a node's tag after the
call's tag; it is empty if both are equal. A node may also have owners outside the call: their addresses and tags are
absolute and begin with exactly two slashes: ``//encoder.layer.1``.
"""

from __future__ import annotations

from collections.abc import Mapping

from modelexport.core.calls import CallTree, ModuleCall
from modelexport.core.tags import CallTags


def relative_addresses(calls: CallTree, call: ModuleCall) -> Mapping[ModuleCall, str]:
    """The relative address of a call and of each call inside it. For the root these are the addresses themselves."""
    prefix = f"{call.path}." if call.path else ""
    first: dict[str, int] = {}
    addresses: dict[ModuleCall, str] = {}
    for other in sorted(calls.inside(call)):
        index = other.index - first.setdefault(other.path, other.index)
        if other.path == call.path:
            path = ""
        elif other.path.startswith(prefix):
            path = other.path.removeprefix(prefix)
        else:
            path = f"/{other.path}"
        addresses[other] = str(ModuleCall(path, index))
    return addresses


class Scope:
    """How the body of a call names the calls inside it; the body of the root is the main graph."""

    def __init__(self, tags: CallTags, call: ModuleCall) -> None:
        self.is_root = tags.calls[call].parent is None
        self._tags = tags
        self._addresses = relative_addresses(tags.calls, call)
        self._prefix = "" if self.is_root else tags.source_tag(call)

    def address(self, call: ModuleCall) -> str:
        """The call's address, relative to the scope."""
        return self._addresses.get(call, f"//{call.address}")

    def tag(self, call: ModuleCall) -> str:
        """The source tag of a node that the call owns, relative to the scope."""
        tag = self._tags.source_tag(call)
        if call not in self._addresses:
            return f"/{tag}"
        assert tag.startswith(self._prefix), "the tag of a level extends that of the level above it"
        return tag.removeprefix(self._prefix)

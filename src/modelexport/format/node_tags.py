"""The tags of a node in its ``metadata_props``: the only code that writes and reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping, Sequence

from modelexport.core.calls import CallTree
from modelexport.core.json_decoding import decode_json
from modelexport.core.owners import Evidence, Owner
from modelexport.format import keys
from modelexport.format.call_tree import parse_call


def write_tags(
    properties: MutableMapping[str, str], addresses: Sequence[str], source_tags: Sequence[str], evidence: Evidence
) -> None:
    """Write which calls own a node, replacing its earlier tags.

    Args:
        addresses: The address of each owner, the one that produces the node's output first.
        source_tags: The source tag of each owner, in the same order.
    """
    properties[keys.SOURCE_MODULE], properties[keys.CALL] = source_tags[0], addresses[0]
    properties[keys.EVIDENCE] = evidence.value
    if len(addresses) > 1:
        properties[keys.HIERARCHY_TAGS], properties[keys.CALLS] = json.dumps(source_tags), json.dumps(addresses)
    else:
        properties.pop(keys.HIERARCHY_TAGS, None)
        properties.pop(keys.CALLS, None)


def read_addresses(properties: Mapping[str, str]) -> list[str]:
    """The address of each owner, the one that produces the node's output first; empty for a node without tags.

    Raises:
        ValueError: The properties are damaged.
    """
    return _several_or_one(properties, keys.CALLS, keys.CALL)


def read_source_tags(properties: Mapping[str, str]) -> list[str]:
    """The source tag of each owner, in the order of :func:`read_addresses`.

    Raises:
        ValueError: The properties are damaged.
    """
    return _several_or_one(properties, keys.HIERARCHY_TAGS, keys.SOURCE_MODULE)


def _several_or_one(properties: Mapping[str, str], several: str, one: str) -> list[str]:
    if several in properties:
        return decode_json(properties[several], kind=list[str])
    return [properties[one]] if one in properties else []


class OwnerReader:
    """Reads the owners of nodes; nodes with the same tags share one object.

    Args:
        calls: Every call of the model.
    """

    def __init__(self, calls: CallTree) -> None:
        self._calls = calls
        self._known: dict[tuple[str, str], tuple[Owner, str]] = {}
        """What nodes say of their owners to the owner and its address."""

    def read(self, properties: Mapping[str, str]) -> Owner | None:
        """The owner of a node; ``None`` for a node without tags.

        Raises:
            LookupError, ValueError: The properties are damaged.
        """
        if keys.CALL not in properties:
            return None
        said = properties.get(keys.CALLS) or properties[keys.CALL], properties[keys.EVIDENCE]
        if said not in self._known:
            owner = Owner(tuple(map(parse_call, read_addresses(properties))), Evidence(properties[keys.EVIDENCE]))
            if missing := next((call for call in owner.calls if call not in self._calls), None):
                raise ValueError(f"a node belongs to '{missing}', which is not a call of the model")
            self._known[said] = owner, owner.call.address
        owner, address = self._known[said]
        if len(read_source_tags(properties)) != len(owner.calls) or properties[keys.CALL] != address:
            raise ValueError(f"the addresses and the tags of a node of '{owner.call}' do not match")
        return owner

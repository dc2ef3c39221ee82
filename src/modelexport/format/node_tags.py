"""The owner and the tags of a node as text in its properties: the only code that reads and writes these."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from modelexport.core.calls import CallTree
from modelexport.core.json_decoding import decode_json
from modelexport.core.owners import Evidence, Owner
from modelexport.core.tags import CallTags
from modelexport.format import keys
from modelexport.format.call_tree import parse_call

NODE_KEYS = (
    keys.SOURCE_MODULE,
    keys.CALL,
    keys.EVIDENCE,
    keys.HIERARCHY_TAGS,
    keys.CALLS,
    keys.LINE,
    keys.NAMESPACE,
    keys.LAYER_ANNOTATION,
)
"""The properties of a node that its owner has."""


def owner_properties(owner: Owner, tags: CallTags) -> dict[str, str]:
    """The properties of a node that an owner has."""
    addresses, source_tags = [call.address for call in owner.calls], [tags.source_tag(call) for call in owner.calls]
    properties = tag_properties(addresses, source_tags, owner.evidence, owner.line)
    properties[keys.NAMESPACE] = tags.namespace(owner.call)
    properties[keys.LAYER_ANNOTATION] = owner.call.annotation
    return properties


def tag_properties(
    addresses: Sequence[str], source_tags: Sequence[str], evidence: Evidence, line: str = ""
) -> dict[str, str]:
    """Which calls own a node: their addresses and source tags, of the one that produces the node's output first."""
    properties = {keys.SOURCE_MODULE: source_tags[0], keys.CALL: addresses[0], keys.EVIDENCE: evidence.value}
    if line:
        properties[keys.LINE] = line
    if len(addresses) > 1:
        properties |= {keys.HIERARCHY_TAGS: json.dumps(source_tags), keys.CALLS: json.dumps(addresses)}
    return properties


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


def _several_or_one(properties: Mapping[str, str], several: str, single: str) -> list[str]:
    if several in properties:
        return decode_json(properties[several], kind=list[str])
    return [properties[single]] if single in properties else []


class OwnerReader:
    """Reads the owners of nodes; nodes with the same tags share one object.

    Args:
        calls: Every call of the model.
    """

    def __init__(self, calls: CallTree) -> None:
        self._calls = calls
        self._known: dict[tuple[str, str, str], tuple[Owner, str]] = {}
        """What nodes say of their owners to the owner and its address."""

    def read(self, properties: Mapping[str, str]) -> Owner | None:
        """The owner of a node; ``None`` for a node without tags.

        Raises:
            LookupError, ValueError: The properties are damaged.
        """
        if keys.CALL not in properties:
            return None
        evidence, line = properties[keys.EVIDENCE], properties.get(keys.LINE, "")
        texts = properties.get(keys.CALLS) or properties[keys.CALL], evidence, line
        if texts not in self._known:
            owner = Owner(tuple(map(parse_call, read_addresses(properties))), Evidence(evidence), line)
            if missing := next((call for call in owner.calls if call not in self._calls), None):
                raise ValueError(f"a node belongs to '{missing}', which is not a call of the model")
            self._known[texts] = owner, owner.call.address
        owner, address = self._known[texts]
        if len(read_source_tags(properties)) != len(owner.calls) or properties[keys.CALL] != address:
            raise ValueError(f"the addresses and the tags of a node of '{owner.call}' do not match")
        return owner

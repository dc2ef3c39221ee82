"""What ``internals`` finds out, as values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec


class KeyFacts(msgspec.Struct, frozen=True):
    """One kind of record on the nodes of a graph."""

    nodes: int
    """How many have it."""
    bytes: int | None
    """Of all of them as text, in UTF-8, the names of keys in a file included; ``None`` for values that are not text."""


class Stage(msgspec.Struct, frozen=True):
    """The graph of one exporter at one stage."""

    name: str
    """``captured``, ``decomposed``, ``translated``, ``optimised`` or ``written``."""
    graph: str
    """What the graph is made of: ``FX``, ``TorchScript`` or ``ONNX``."""
    nodes: int
    """Nested graphs included; inputs, parameters and outputs do not count."""
    located: int
    """How many name the module that they came from."""
    calls: int
    """Different calls that these records name, the calls around a node's own included."""
    keys: dict[str, KeyFacts]

    @property
    def bytes(self) -> int:
        """Of all records that are text."""
        return sum(key.bytes or 0 for key in self.keys.values())


class FrontEnd(msgspec.Struct, frozen=True):
    """One exporter."""

    name: str
    stages: list[Stage]
    """As far as it came."""
    error: str | None
    """Why it came no further, in one line."""


class MapEntry(msgspec.Struct, frozen=True):
    """One module in the map that the TorchScript exporter makes of the model."""

    path: str
    class_name: str
    scope: str | None
    """What the map calls it: ``package.Class::name``."""


class Quality(msgspec.Struct, frozen=True):
    """How much some scope names say."""

    none: int
    """Empty or missing."""
    plain: int
    """A name without a class."""
    class_scopes: int
    """A class and a name, ``package.Class::name``, but not what it is in."""
    full_hierarchies: int
    """The whole chain from the root: ``package.Root::/package.Class::name``."""
    different: int
    """How many different ones there are."""


class Internals(msgspec.Struct, frozen=True):
    """What the exporters record of one model."""

    model: str
    modules: int
    """The root included."""
    calls: int
    """That one run makes."""
    modules_called: int
    module_map: list[MapEntry]
    """In the order of ``named_modules()``; empty where the TorchScript exporter did not come so far."""
    map_quality: Quality
    scope_quality: Quality
    """Of the scopes on the nodes that the TorchScript exporter captured, each different one once."""
    front_ends: list[FrontEnd]


def quality(scopes: Iterable[str | None], root: str) -> Quality:
    """Sort scope names by how much they say.

    Args:
        root: The scope of the root, with which full hierarchies begin.
    """
    names = list(scopes)
    given = [name for name in names if name]
    full = sum(name == root or name.startswith(f"{root}/") for name in given)
    plain = sum("::" not in name for name in given)
    return Quality(len(names) - len(given), plain, len(given) - full - plain, full, len(set(given)))


def key_facts(found: Mapping[str, list[int | None]]) -> dict[str, KeyFacts]:
    """Key to the bytes of each node's record, ``None`` for values that are not text, added up."""
    return {
        key: KeyFacts(len(sizes), None if None in sizes else sum(size or 0 for size in sizes))
        for key, sizes in sorted(found.items())
    }

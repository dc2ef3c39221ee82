"""The results of ``internals``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec


class KeyFacts(msgspec.Struct, frozen=True):
    """One kind of record on the nodes of a graph."""

    nodes: int
    """How many nodes have it."""
    bytes: int | None
    """The bytes of all of them as UTF-8 text, with the key names in a file; ``None`` for values that are not text."""


class ExporterStage(msgspec.Struct, frozen=True):
    """The graph of one exporter at one stage."""

    name: str
    """``captured``, ``decomposed``, ``translated``, ``optimised`` or ``written``."""
    graph: str
    """The kind of the graph: ``FX``, ``TorchScript`` or ``ONNX``."""
    nodes: int
    """The number of nodes, nested graphs included, without inputs, parameters and outputs."""
    located: int
    """How many nodes name the module that they came from."""
    calls: int
    """The number of different calls that these records name, including the callers of a node's own call."""
    keys: dict[str, KeyFacts]

    @property
    def bytes(self) -> int:
        """The bytes of all records that are text."""
        return sum(key.bytes or 0 for key in self.keys.values())


class FrontEnd(msgspec.Struct, frozen=True):
    """One exporter."""

    name: str
    stages: list[ExporterStage]
    """The stages that were reached."""
    error: str | None
    """Why the exporter failed, in one line."""


class MapEntry(msgspec.Struct, frozen=True):
    """One module in the map that the TorchScript exporter makes of the model."""

    path: str
    class_name: str
    scope: str | None
    """The module's name in the map: ``package.Class::name``."""


class Quality(msgspec.Struct, frozen=True):
    """How much information scope names contain."""

    none: int
    """Scope names that are empty or missing."""
    plain: int
    """A name without a class."""
    class_scopes: int
    """A class and a name, ``package.Class::name``, without the enclosing scopes."""
    full_hierarchies: int
    """The whole chain from the root: ``package.Root::/package.Class::name``."""
    different: int
    """The number of different scope names."""


class Internals(msgspec.Struct, frozen=True):
    """What the exporters record about one model."""

    model: str
    modules: int
    """The number of modules, with the root."""
    calls: int
    """The number of calls in one run."""
    modules_called: int
    module_map: list[MapEntry]
    """In the order of ``named_modules()``; empty if the TorchScript exporter did not get that far."""
    map_quality: Quality
    scope_quality: Quality
    """The quality of the scopes on the nodes that the TorchScript exporter captured, each different scope once."""
    front_ends: list[FrontEnd]


def quality(scopes: Iterable[str | None], root: str) -> Quality:
    """Classify scope names by how much information they contain.

    Args:
        root: The scope of the root; full hierarchies begin with it.
    """
    all_scopes = list(scopes)
    names = [name for name in all_scopes if name]
    full = sum(name == root or name.startswith(f"{root}/") for name in names)
    plain = sum("::" not in name for name in names)
    return Quality(len(all_scopes) - len(names), plain, len(names) - full - plain, full, len(set(names)))


def key_facts(sizes_by_key: Mapping[str, list[int | None]]) -> dict[str, KeyFacts]:
    """Sum up, for each key, the bytes of each node's record; ``None`` is a value that is not text."""
    return {
        key: KeyFacts(len(sizes), None if None in sizes else sum(size or 0 for size in sizes))
        for key, sizes in sorted(sizes_by_key.items())
    }

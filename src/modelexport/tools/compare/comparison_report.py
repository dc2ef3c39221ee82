"""What ``compare`` finds: the facts about two tagged files, and how their calls differ."""

from __future__ import annotations

import msgspec

from modelexport.core.result_display import Rows, Shown
from modelexport.core.text import short_repr
from modelexport.format import documents


class Held(msgspec.Struct, frozen=True):
    """Some initializers of a file."""

    initializers: int
    bytes: int


class FileFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one whole file."""

    __repr__ = short_repr

    path: str
    bytes: int
    """Bytes of the file and its weights files."""
    version: str
    """The version of modelexport that wrote it; empty for a file without tags."""
    encoding: str
    """``none`` for a file without tags."""
    opsets: dict[str, int]
    """Domain to opset version; the standard domain is the empty string."""
    settings: documents.Settings | None
    """The settings of the export; ``None`` without a sidecar."""
    environment: dict[str, str]
    """Package to version; empty without a sidecar."""
    calls: int
    nodes: int
    coverage: documents.Coverage
    operators: dict[str, int]
    """Operator to number of nodes, nested graphs included."""
    parameters: dict[str, Held]
    """Element type to the initializers that hold or are computed from ``state_dict`` entries."""
    constants: dict[str, Held]
    """Element type to the other initializers, and the constants."""
    entries: int
    """``state_dict`` entries of the module."""


class OnlyInOne(msgspec.Struct, frozen=True):
    """A call that only one of the files has; the calls inside it are counted with it and not listed."""

    address: str
    tag: str
    calls: int
    """The number of calls: this one and those inside it, which the other file does not have either."""
    nodes: int
    """The number of their nodes."""


class CallChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call that both files have, with its differences. Each pair is the first file's value and the second's."""

    address: str
    class_name: tuple[str, str] | None = None
    tag: tuple[str, str] | None = None
    """Its own tag."""
    source_module: tuple[str, str] | None = None
    """The tag on its nodes; not compared if it has no nodes in one of the files."""
    operators: dict[str, tuple[int, int]] = {}
    """Operator to the numbers of its own nodes, if they differ."""
    attributes: dict[str, int] = {}
    """Operator to the number of its own nodes with other attributes, if the numbers of nodes are equal."""
    constants: dict[str, int] = {}
    """Operator to the number of its own nodes that take other constants, if the numbers of nodes are equal."""
    parameters: dict[str, tuple[str | None, str | None]] = {}
    """``state_dict`` key to the type of its own nodes' initializer: ``float32[384, 384] by Transpose``."""


class EntryChange(msgspec.Struct, frozen=True):
    """A ``state_dict`` entry that differs between the modules: ``float32[384, 384]``, or ``None`` if missing."""

    key: str
    entry: tuple[str | None, str | None]


class Values(msgspec.Struct, frozen=True):
    """Parameters that both files store in the same way, compared byte by byte."""

    equal: int
    different: list[str]
    """Names of initializers in the first file."""
    unpaired: list[str] = []
    """Initializers of either file that the other stores differently, or has not, so they were not compared."""


class FileComparison(Shown, msgspec.Struct, frozen=True, kw_only=True):
    """How two tagged files differ."""

    first: FileFacts
    second: FileFacts
    only_in_first: list[OnlyInOne]
    only_in_second: list[OnlyInOne]
    changed: list[CallChange]
    """The changed calls, in the order of the first file."""
    same: int
    """Calls that both files have without differences."""
    entries: list[EntryChange]
    values: Values | None
    """The comparison of parameters; ``None`` if they were not compared."""
    notes: list[str]
    """The parts that could not be compared, and why."""
    selected: bool = False
    """Whether only some calls are compared: then calls, nodes, operators and parameters of the facts are theirs."""

    def __repr__(self) -> str:
        only = len(self.only_in_first) + len(self.only_in_second)
        return (
            f"<FileComparison {self.first.path}, {self.second.path}: {self.same:,} calls without differences, "
            f"{len(self.changed):,} changed, {only:,} in one file only; {len(self.entries):,} other state_dict entries>"
        )

    def _table(self) -> Rows:
        yield "call", "difference"
        for facts, only in ((self.first, self.only_in_first), (self.second, self.only_in_second)):
            yield from (
                (call.address, f"only in {facts.path}: {call.calls} calls, {call.nodes} nodes") for call in only
            )
        for change in self.changed:
            counts = [f"{after - before:+} {operator}" for operator, (before, after) in change.operators.items()]
            differences = [
                *counts,
                *(f"attributes of {operator}" for operator in change.attributes),
                *(f"constants of {operator}" for operator in change.constants),
                *change.parameters,
            ]
            yield change.address or ".", ", ".join(differences) or "tags"

    @property
    def differs(self) -> bool:
        """Whether any module differs; size, versions and settings of the files are ignored."""
        modules = (self.only_in_first, self.only_in_second, self.changed, self.entries)
        return any(modules) or bool(self.values and self.values.different)

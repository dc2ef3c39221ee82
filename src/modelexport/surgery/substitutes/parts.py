"""What a substitute is asked for, and what it gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.owners import Owner
from modelexport.format import documents
from modelexport.surgery.cutter import Cut
from modelexport.surgery.edited_tags import EditedTags
from modelexport.surgery.interfaces import Interface


@dataclass(frozen=True)
class Site:
    """A call that is replaced: its values as they are by now, and its nodes as they were."""

    interface: Interface
    weights: Sequence[ir.Value]
    """The initializers that its nodes use, in the order of the nodes."""
    cut: Cut | None
    """The call as a model of its own, where the substitute wants it."""

    @property
    def call(self) -> ModuleCall:
        return self.interface.call


@dataclass
class Parts:
    """What is put into the graph."""

    nodes: list[ir.Node]
    outputs: list[ir.Value]
    """In the order of the site's outputs."""
    owners: Mapping[ir.Node, Owner] = field(default_factory=dict)
    """Of the nodes that the replaced call does not own itself; those of nested graphs included."""
    weights: Mapping[ir.Value, tuple[str, ...]] = field(default_factory=dict)
    """New initializers to their ``state_dict`` keys; empty for those that come from none."""
    functions: Sequence[ir.Function] = ()
    opsets: Mapping[str, int] = field(default_factory=dict)
    entries: Mapping[str, documents.StateDictEntry] = field(default_factory=dict)


class Substitute(Protocol):
    """Makes what takes a call's place."""

    @property
    def keep_body(self) -> bool:
        """Whether it wants the call as a model of its own."""

    @property
    def name(self) -> str:
        """What the tags say of it."""

    def build(self, site: Site, tags: EditedTags, used: Iterable[ModuleCall]) -> Parts:
        """New nodes for a call; changes the calls inside it in ``tags``.

        Args:
            used: The calls that own other nodes.
        """

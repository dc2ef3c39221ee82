"""The calls that a node was executed in, and how they are known."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from modelexport.core.calls import ModuleCall


class Evidence(enum.StrEnum):
    """How an owner is known, best first."""

    EXACT = "exact"
    """The exporter recorded the call when it made the node."""
    DERIVED = "derived"
    """Derived from nodes whose owners are exact: those that it replaces, leads to, comes from or stands between."""
    INFERRED = "inferred"
    """Inferred because producers and consumers agree. The last resort; counted separately."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The calls that a node was executed in, the one that produces its output first, and the evidence for them."""

    calls: tuple[ModuleCall, ...]
    evidence: Evidence = Evidence.EXACT
    line: str = field(default="", compare=False)
    """The line of the model's code that made the node, ``transformers.models.bert.modeling_bert:354``: a module of
    Python and a number; empty if it is not known."""

    def __post_init__(self) -> None:
        if not self.calls or len(set(self.calls)) != len(self.calls):
            raise ValueError(f"an owner needs at least one call and no call twice, got {self.calls}")

    @property
    def call(self) -> ModuleCall:
        """The call that produces the node's output."""
        return self.calls[0]


def derived_owner(owners: Iterable[Owner | None]) -> Owner | None:
    """The owner of a node that was made from nodes with some owners: all of their calls, with the line of the first."""
    known = [owner for owner in owners if owner is not None]
    calls = dict.fromkeys(call for owner in known for call in owner.calls)
    return Owner(tuple(calls), Evidence.DERIVED, known[0].line) if known else None

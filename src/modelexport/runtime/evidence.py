"""The protocol of a recorded PyTorch run: a run of the model, or reference values from a file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from modelexport.core.calls import ModuleCall, Side
from modelexport.runtime.choices import Choice
from modelexport.runtime.fingerprints import Fingerprint


class Place(NamedTuple):
    """Where a call gets or returns a tensor."""

    call: ModuleCall
    side: Side
    name: str


@dataclass(frozen=True)
class Replaced:
    """What a run with other tensors in some places shows, filled as it goes on."""

    computed: dict[Place, Any] = field(default_factory=dict)
    """What the model computed there."""
    places: set[Place] = field(default_factory=set)
    """Those where another tensor took the place of what it computed."""


class SeenTensor(NamedTuple):
    """One tensor that a call got or returned."""

    call: ModuleCall
    side: Side
    name: str
    content: str
    """Equal for tensors of the same element type and equal elements, independent of their shape."""
    dtype: str
    shape: tuple[int, ...]
    random: bool | None = None
    """Whether it was computed from random numbers; ``None`` if that was not recorded."""

    @property
    def place(self) -> Place:
        return Place(self.call, self.side, self.name)


class Computed(NamedTuple):
    """The result of one operation."""

    call: ModuleCall
    """The innermost call that was running."""
    fingerprint: Fingerprint
    new: bool
    """Whether it differs from the operation's inputs: it is not a view or a copy of one."""
    chosen: bool = False
    """Whether it is the result of a branch or a loop, where other operations computed it."""
    random: bool | None = None
    """Whether it was computed from random numbers; ``None`` if that was not recorded."""
    bounded: bool = False
    """Whether the operation has a bound that none of the numbers reach."""


class Number(NamedTuple):
    """A tensor that a condition is computed from by comparisons, or that a branch returns."""

    content: str
    dtype: str
    shape: tuple[int, ...]


class Decision(NamedTuple):
    """The condition of a branch."""

    call: ModuleCall
    numbers: tuple[Number, ...]
    results: tuple[tuple[Number, ...], ...] = ()
    """What each branch returns; empty if only one was run."""


@dataclass(frozen=True)
class RandomPart:
    """What depends on random numbers in a run."""

    calls: frozenset[ModuleCall] | None = None
    """The calls that computed something from random numbers; ``None`` if that was not recorded."""
    tensors: Sequence[SeenTensor] = ()
    """What calls got and returned that differs with other random numbers: not among the tensors of the run."""


class Evidence(Protocol):
    """A run of a PyTorch model."""

    @property
    def tensors(self) -> Sequence[SeenTensor]: ...

    @property
    def computed(self) -> Sequence[Computed]: ...

    @property
    def quiet(self) -> Sequence[Computed]:
        """The results whose numbers do not tell their call, as a mask of ones; empty if they were not recorded."""

    @property
    def choices(self) -> Sequence[Choice]:
        """Where it took the largest or the smallest of some scores, in the order of the run."""

    @property
    def decisions(self) -> Sequence[Decision]:
        """The conditions of branches, those in both branches of another before it; empty if they were not recorded."""

    @property
    def random(self) -> RandomPart: ...

    @property
    def outputs(self) -> Sequence[Any]: ...

    @property
    def parents(self) -> Mapping[ModuleCall, ModuleCall | None]:
        """Every call to the call that it ran in, in the order in which they began."""

    def array(self, content: str) -> Any:
        """The elements of a content, flat."""

    def in_float64(self, given: Collection[str] = ()) -> Evidence | None:
        """The same run in float64, to measure the effect of rounding; ``None`` if there is none.

        Args:
            given: Contents that calls get and return as this run has them, so that only the rounding of what is
                computed after these adds up.
        """

    def rounded_otherwise(self, given: Collection[str] = ()) -> Evidence | None:
        """The same run in the same types, each operation rounded otherwise; ``None`` if there is none.

        A model may compute something else in float64, as one that asks for the smallest number of its type.

        Args:
            given: As in :meth:`in_float64`.
        """

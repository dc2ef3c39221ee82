"""What a run of a PyTorch model shows, whoever ran it: the model just now, or a file that kept it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from modelexport.core.calls import ModuleCall, Side
from modelexport.runtime.choices import Choice
from modelexport.runtime.fingerprints import Fingerprint


class SeenTensor(NamedTuple):
    """One tensor that a call got or returned, in the order of the run."""

    call: ModuleCall
    side: Side
    name: str
    content: str
    """Equal for tensors of one element type and equal numbers, whatever their shape."""
    dtype: str
    shape: tuple[int, ...]


class Computed(NamedTuple):
    """What one operation gave."""

    call: ModuleCall
    """The innermost that was running."""
    fingerprint: Fingerprint
    new: bool
    """Whether it is other than what the operation got: not a view or a copy of it."""


class Evidence(Protocol):
    """A run of a PyTorch model."""

    @property
    def tensors(self) -> Sequence[SeenTensor]: ...

    @property
    def computed(self) -> Sequence[Computed]: ...

    @property
    def choices(self) -> Sequence[Choice]:
        """Where it took the largest or the smallest of some scores, in the order of the run."""

    @property
    def outputs(self) -> Sequence[Any]: ...

    @property
    def parents(self) -> Mapping[ModuleCall, ModuleCall | None]:
        """Every call to the one that it ran in, in the order in which they began."""

    def array(self, content: str) -> Any:
        """The numbers of a content, flat."""

    def in_float64(self, *, from_right_values: bool) -> Evidence | None:
        """The same run in float64, for what rounding does; ``None`` where there is none."""

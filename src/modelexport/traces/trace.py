"""What a run computed: the tensors that module calls got and returned, and the results of operations.

A trace comes from a PyTorch model (``pytorch/runs/model_trace.py``), from a file (:mod:`.file_trace`) or from reference
values. Equal arrays are one :class:`Content`, so that to find a value of one run in another is a lookup.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from modelexport.core.calls import ModuleCall, Side
from modelexport.traces.fingerprints import Fingerprint, fingerprint_of
from modelexport.traces.kept_arrays import KeptArrays
from modelexport.traces.tolerances import EQUAL_IN_FLOAT64


class TensorPlace(NamedTuple):
    """Where a call gets or returns a tensor."""

    call: ModuleCall
    side: Side
    name: str


@dataclass(eq=False)
class Content:
    """The elements of equal arrays of a run, in their order."""

    fingerprint: Fingerprint
    computed: dict[ModuleCall, None] = field(default_factory=dict)
    """The calls in which an operation gave it; the innermost that was running."""
    passed: dict[ModuleCall, None] = field(default_factory=dict)
    """The calls that got or returned it."""
    array: Any = None
    """The elements, if a call got or returned them."""


class SeenTensor(NamedTuple):
    """A tensor that a call got or returned."""

    place: TensorPlace
    content: Content
    dtype: str
    """The element type that the model gives it."""
    shape: tuple[int, ...]


class Choice(NamedTuple):
    """A choice of the largest or the smallest of some scores in a run."""

    scores: Any
    indices: Any


@dataclass(eq=False)
class Trace:
    """The tensors, the tree of calls and the random numbers of a run."""

    contents: Index = field(default_factory=lambda: Index())  # noqa: PLW0108 - it is defined below
    tensors: list[SeenTensor] = field(default_factory=list)
    """The tensors in the order in which calls got and returned them."""
    parents: dict[ModuleCall, ModuleCall | None] = field(default_factory=dict)
    """Every call to the one that it ran in, in the order in which they began."""
    choices: list[Choice] = field(default_factory=list)
    random_numbers: list[tuple[ModuleCall, Any]] = field(default_factory=list)
    """Random numbers, in the order in which they were drawn, and the calls that were running."""
    outputs: list[Any] = field(default_factory=list)
    """What the model returned, in order."""
    draws_numbers: bool = False
    """Whether random numbers were drawn, recorded or not."""
    is_float64: bool = True
    """Whether it was computed in float64."""
    kept_before: list[Fingerprint] = field(default_factory=list)
    """Tensors of a narrower type that a run in float64 used, but did not compute, besides weights."""
    stored_tolerance: float = 0.0
    """The error that is allowed for values computed from the arrays, if the arrays are rounded; 0 if not."""

    def side(self, call: ModuleCall, side: Side) -> list[SeenTensor]:
        """The tensors that a call got, or that it returned."""
        return self._by_call.get((call, side), [])

    @property
    def _by_call(self) -> Mapping[tuple[ModuleCall, Side], list[SeenTensor]]:
        if self._sides is None or self._sides[0] != len(self.tensors):
            by_call: dict[tuple[ModuleCall, Side], list[SeenTensor]] = defaultdict(list)
            for tensor in self.tensors:
                by_call[tensor.place.call, tensor.place.side].append(tensor)
            self._sides = len(self.tensors), by_call
        return self._sides[1]

    _sides: tuple[int, Mapping[tuple[ModuleCall, Side], list[SeenTensor]]] | None = None


class Index:
    """Contents by their elements."""

    def __init__(self) -> None:
        self._by_size: dict[int, list[tuple[float, int]]] = defaultdict(list)
        self._contents: list[Content] = []
        self._sorted = True
        self._known: dict[Fingerprint, Content] = {}
        self.kept = KeptArrays()

    def __iter__(self) -> Iterator[Content]:
        return iter(self._contents)

    def add(self, array: Any, *, keep: bool = False) -> Content:
        """The content of an array, a new one if there is none of bit-equal sums.

        Args:
            keep: Whether to keep a copy of the array.
        """
        content = self.known(fingerprint_of(array))
        if keep and content.array is None:
            content.array = self.kept.copy(array)
        return content

    def known(self, fingerprint: Fingerprint) -> Content:
        """The content with a fingerprint, a new one if there is none."""
        content = self._known.get(fingerprint)
        if content is None:
            content = self._known[fingerprint] = Content(fingerprint)
            self._by_size[fingerprint.size].append((fingerprint.norm, len(self._contents)))
            self._contents.append(content)
            self._sorted = False
        return content

    def equal_in_order(self, fingerprint: Fingerprint, allowed_error: float = EQUAL_IN_FLOAT64) -> list[Content]:
        """The contents that are equal to an array, in its order."""
        return [
            content
            for content in self._near(fingerprint, allowed_error)
            if content.fingerprint.equal_in_order(fingerprint, allowed_error)
        ]

    def equal_in_any_order(self, fingerprint: Fingerprint, allowed_error: float = EQUAL_IN_FLOAT64) -> list[Content]:
        """The contents that have the elements of an array, in any order."""
        return [
            content
            for content in self._near(fingerprint, allowed_error)
            if content.fingerprint.equal_in_any_order(fingerprint, allowed_error)
        ]

    def _near(self, fingerprint: Fingerprint, allowed_error: float) -> Iterable[Content]:
        if not self._sorted:
            for entries in self._by_size.values():
                entries.sort()
            self._sorted = True
        entries = self._by_size.get(fingerprint.size, [])
        apart = 2 * allowed_error * fingerprint.norm
        first = bisect_left(entries, (fingerprint.norm - apart, -1))
        last = bisect_right(entries, (fingerprint.norm + apart, len(self._contents)))
        return (self._contents[number] for _, number in entries[first:last])

"""What a file computes: the range of each value over several runs, and the first NaN or infinity.

Each value is looked at when it is computed, and then forgotten: one value at a time is in memory besides those that
later nodes take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakValueDictionary

import ml_dtypes
import numpy as np
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.graph.missing_types import fill_types
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import initializers, nested_graphs
from modelexport.runtime.half_precision import reach
from modelexport.tagged.file import TaggedFile
from modelexport.traces.file_run import FileRun

BFLOAT16 = float(np.finfo(np.float32).max) * (2 - 2**-7) / (2 - 2**-23)
FLOAT16_ROUNDS_TO_ZERO = float(np.finfo(np.float16).smallest_subnormal) / 2
"""Numbers up to this size are zero in float16."""


@dataclass
class ValueRange:
    """The numbers of one value, or of several, over all runs."""

    smallest: float = np.inf
    largest: float = -np.inf
    """The largest and the smallest finite element; infinite if there are none."""
    smallest_run: int = 0
    largest_run: int = 0
    """The runs in which they were, from 0."""
    elements: int = 0
    zeros: int = 0
    nan: int = 0
    infinite: int = 0
    lost: int = 0
    """How many elements are not zero, and are zero in float16."""
    reach: float = 0.0
    """The largest size that another type has to hold: not the number by which a mask hides."""
    sizes: float = 0.0
    """The sum of the sizes of the finite elements."""
    powers: Counter[int] = field(default_factory=Counter)
    """How many elements are between half of a power of two and that power, by its exponent."""

    def add(self, array: Any, run: int) -> None:
        """Count the elements of an array."""
        numbers = array.astype(np.float32) if array.dtype.itemsize < 4 else array
        finite = numbers[np.isfinite(numbers)]
        self.elements += numbers.size
        self.nan += int(np.isnan(numbers).sum())
        self.infinite += int(np.isinf(numbers).sum())
        if not finite.size:
            return
        sizes = np.abs(finite)
        least, most = float(finite.min()), float(finite.max())
        if least < self.smallest:
            self.smallest, self.smallest_run = least, run
        if most > self.largest:
            self.largest, self.largest_run = most, run
        self.reach = max(self.reach, reach(finite, of_weights=False))
        some = sizes[sizes > 0]
        self.zeros += finite.size - some.size
        self.lost += int((some <= FLOAT16_ROUNDS_TO_ZERO).sum())
        self.sizes += float(sizes.sum(dtype=np.float64))
        if some.size:
            exponents = np.frexp(some)[1]
            first = int(exponents.min())
            for offset, count in enumerate(np.bincount(exponents - first).tolist()):
                if count:
                    self.powers[first + offset] += count

    @property
    def size(self) -> float:
        """The largest size of a finite element; 0 if there are none."""
        return max(abs(self.smallest), abs(self.largest)) if self.smallest <= self.largest else 0.0

    @property
    def not_finite(self) -> str:
        """NaN and infinities in words; empty if there are none."""
        found = [f"{self.nan:,} NaN"] * bool(self.nan) + [f"{self.infinite:,} infinite"] * bool(self.infinite)
        return ", ".join(found)


@dataclass(frozen=True)
class TakenValue:
    """A value that a node took."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    range: ValueRange
    element: float | None = None
    """The element that the first NaN or infinity is made of, where a node computes it from one element of each."""


@dataclass(frozen=True, eq=False)
class Origin:
    """Where NaN or infinities come from that reach an output."""

    kind: Literal["node", "input", "weight"]
    """A node makes them of finite inputs, or of the infinities of a mask; or an input or a weight has them."""
    what: Literal["NaN", "infinity"]
    name: str
    """The name of the node, the input or the weight."""
    order: int
    """The number of nodes that ran before it."""
    run: int
    node: ir.Node | None = None
    """The node that makes them, or the first one that takes them."""
    value: str = ""
    takes: tuple[TakenValue, ...] = ()
    place: tuple[int, ...] = ()
    """The indices of the first NaN or infinity."""

    @property
    def call(self) -> ModuleCall | None:
        owner = owner_of(self.node) if self.node is not None else None
        return owner.call if owner is not None else None

    @property
    def line(self) -> str:
        """The line of the model's code that made the node; empty if it is not known."""
        owner = owner_of(self.node) if self.node is not None else None
        return owner.line if owner is not None else ""


@dataclass(frozen=True)
class ValueRanges:
    """The ranges of the values of a file over several runs, and its NaN and infinities."""

    ranges: Mapping[ir.Value, ValueRange]
    """The inputs of the file and the results of its nodes, those of floating-point numbers."""
    first: Origin | None
    """The origin of the first NaN or infinity that reaches an output, in the first run that has one."""
    inside: tuple[Origin, ...]
    """The origins of NaN and infinities that reach no output."""
    runs: int


Compute = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Gives the names of the values that a run elsewhere computed, to their arrays."""


def measure_values(
    tagged: TaggedFile, runs: Iterable[Mapping[str, Any]], elsewhere: Compute | None = None
) -> ValueRanges:
    """Run a file, each time with other inputs, in its own types, as the standard defines its operators.

    Args:
        elsewhere: Runs the file instead; the values of branches and loops are not known then.

    Raises:
        NodeError: A node cannot be computed.
        UsageError: An input is missing.
    """
    fill_types(tagged.model)  # results are rounded to their types
    run = FileRun(tagged.model, in_float64_for=None, other_branches=False)
    ranges: dict[ir.Value, ValueRange] = {}
    first: Origin | None = None
    inside: dict[tuple[str, str], Origin] = {}
    count = 0
    with np.errstate(all="ignore"):
        for inputs in runs:
            watcher = _Watcher(run, ranges, count)
            for value in run.inputs:
                if value.name in inputs:
                    array = np.asarray(inputs[value.name or ""])
                    watcher.count(value, array)
                    watcher.given(value, array)
            if elsewhere is None:
                run.run(inputs, watcher, change=watcher.given)
            else:
                _show(tagged.model, inputs, elsewhere(inputs), watcher)
            reached = {watcher.bad[value] for value in tagged.model.graph.outputs if value in watcher.bad}
            for origin in sorted(watcher.origins, key=lambda each: each.order):
                if origin in reached:
                    first = first or origin
                else:
                    inside.setdefault((origin.kind, origin.name), origin)
            count += 1
    return ValueRanges(ranges, first, tuple(inside.values()), count)


def _show(model: ir.Model, inputs: Mapping[str, Any], computed: Mapping[str, Any], watcher: _Watcher) -> None:
    """Show a watcher the values of a run that was made elsewhere."""
    known = {**inputs, **computed}
    for value in initializers(model):
        if value.const_value is not None and value.name not in known:
            known[value.name or ""] = watcher.given(value, value.const_value.numpy())
    for node in model.graph:
        taken = [None if value is None else known.get(value.name or "") for value in node.inputs]
        for value in node.outputs:
            if (name := value.name or "") in computed:
                watcher(node, taken, value, computed[name])


def _is_float(array: Any) -> bool:
    return isinstance(array, np.ndarray) and (array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16)


class _Watcher:
    """Counts each value of a run, and follows NaN and infinities from where they are made."""

    def __init__(self, run: FileRun, ranges: dict[ir.Value, ValueRange], number: int) -> None:
        self._run, self._ranges, self._number, self._order = run, ranges, number, 0
        self.bad: dict[ir.Value, Origin] = {}
        """Values with NaN or infinities to what made these."""
        self._has_nan: set[ir.Value] = set()
        self._memory = WeakValueDictionary[int, Any]()
        self._sources: dict[int, ir.Value | Origin] = {}
        """Where NaN or infinities in an array come from, by the identity of the array that owns its memory."""
        self.origins: dict[Origin, None] = {}

    def count(self, value: ir.Value, array: Any) -> None:
        if _is_float(array):
            self._ranges.setdefault(value, ValueRange()).add(array, self._number)

    def given(self, value: ir.Value, array: Any) -> Any:
        """Note an input or a constant that has NaN or infinities: the body of a loop knows it by another name."""
        if _is_float(array) and not np.isfinite(array).all():
            self._note(array, value)
        return array

    def _note(self, array: Any, source: ir.Value | Origin) -> None:
        owner = _owner_of_memory(array)
        if self._memory.get(id(owner)) is not owner:
            self._memory[id(owner)], self._sources[id(owner)] = owner, source

    def __call__(self, node: ir.Node, inputs: Sequence[Any], value: ir.Value, array: Any) -> Any:
        self._order += 1
        if _is_float(array):
            self.count(value, array)
            self.bad.pop(value, None)  # of an earlier iteration of a loop
            self._has_nan.discard(value)
            if not np.isfinite(array).all():
                has_nan = bool(np.isnan(array).any())
                self.bad[value] = origin = self._origin(node, inputs, value, array, has_nan)
                self.origins[origin] = None
                self._note(array, origin)
                if has_nan:
                    self._has_nan.add(value)
        return array

    def _origin(self, node: ir.Node, inputs: Sequence[Any], value: ir.Value, array: Any, has_nan: bool) -> Origin:
        """The origin of a node's result: NaN come from NaN, or from infinities that another node made."""
        inside = [each for each in _values_inside(node, inputs, value) if each in self.bad]
        if inside:
            return self.bad[inside[0]]
        nan, infinite = self._taken(node, inputs)
        made = [origin for origin in infinite if origin.kind == "node"]
        before = (nan or made) if has_nan else (nan + infinite)
        if before:
            return min(before, key=lambda origin: origin.order)
        index = tuple(map(int, np.argwhere(np.isnan(array) if has_nan else ~np.isfinite(array))[0]))
        taken = [(one, each) for one, each in zip(node.inputs, inputs, strict=False) if isinstance(each, np.ndarray)]
        elements = self._elements(node, inputs, array, index)
        return Origin(
            "node",
            "NaN" if has_nan else "infinity",
            node.name or "",
            self._order,
            self._number,
            node,
            value.name or "",
            tuple(_described(one, each, elements.get(one)) for one, each in taken if one is not None),
            index,
        )

    def _taken(self, node: ir.Node, inputs: Sequence[Any]) -> tuple[list[Origin], list[Origin]]:
        """The origins of the NaN that a node takes, and those of the infinities."""
        nan: list[Origin] = []
        infinite: list[Origin] = []
        for value, array in zip(node.inputs, inputs, strict=False):
            if value is None or not _is_float(array) or np.isfinite(array).all():
                continue
            has_nan = bool(np.isnan(array).any())
            (nan if has_nan else infinite).append(self._origin_of(node, value, array, has_nan))
        return nan, infinite

    def _origin_of(self, node: ir.Node, value: ir.Value, array: Any, has_nan: bool) -> Origin:
        if value in self.bad:
            return self.bad[value]
        if value.producer() is None and not value.is_initializer() and value not in self._run.inputs:
            owner = _owner_of_memory(array)  # an input of the body of a loop or a function
            source = self._sources.get(id(owner)) if self._memory.get(id(owner)) is owner else None
            if isinstance(source, ir.Value):
                return self._origin_of(node, source, array, has_nan)
            if source is not None or self.origins:
                return source or next(iter(self.origins))
        is_weight = value.is_initializer() or value.producer() is not None
        kind: Literal["input", "weight"] = "weight" if is_weight else "input"
        what: Literal["NaN", "infinity"] = "NaN" if has_nan else "infinity"
        taken = (_described(value, array, None),)
        self.bad[value] = origin = Origin(kind, what, value.name or "", self._order, self._number, node, "", taken)
        return origin

    def _elements(
        self, node: ir.Node, inputs: Sequence[Any], array: Any, index: tuple[int, ...]
    ) -> dict[ir.Value | None, float]:
        """The element of each input that an element of the result is computed from, if these alone give it again."""
        arrays = [each for each in inputs if each is not None]
        if nested_graphs(node) or not all(_is_float(each) for each in arrays):
            return {}
        try:
            if np.broadcast_shapes(*(each.shape for each in arrays)) != array.shape:
                return {}
            single = [
                None if each is None else np.broadcast_to(each, array.shape)[index].reshape([1] * array.ndim)
                for each in inputs
            ]
            again = self._run.nodes.compute(node, single)[0]
        except Exception:  # a node that does not take single elements, whose kernel may raise anything
            return {}
        if again.size != 1 or np.isnan(again.item()) != np.isnan(array[index]) or np.isfinite(again.item()):
            return {}
        return {value: float(one.item()) for value, one in zip(node.inputs, single, strict=False) if one is not None}


def _owner_of_memory(array: Any) -> Any:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _values_inside(node: ir.Node, inputs: Sequence[Any], value: ir.Value) -> Iterable[ir.Value]:
    """The values in nested graphs that one output of a node comes from: of the branch that ran, or of the body."""
    place = node.outputs.index(value) + (node.op_type == "Loop")  # the first output of its body is whether it goes on
    taken = "then_branch" if node.op_type != "If" or np.asarray(inputs[0]).item() else "else_branch"
    for graph in nested_graphs(node):
        if node.op_type != "If" or graph is node.attributes[taken].as_graph():
            yield graph.outputs[place]


def _described(value: ir.Value, array: Any, element: float | None) -> TakenValue:
    found = ValueRange()
    if _is_float(array) or array.dtype.kind in "iu":
        found.add(array if _is_float(array) else array.astype(np.float64), 0)
    return TakenValue(value.name or "", array.dtype.name, tuple(array.shape), found, element)

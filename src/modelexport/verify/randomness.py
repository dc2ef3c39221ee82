"""What a model computes with random numbers: a file draws others, so that only the rest can be compared.

Which tensors these are is told by runs with other random numbers: several, since a few tokens may be drawn twice. They
are made if the file draws random numbers, or if something differs: then its numbers may be those that were drawn when
the model was captured. Each run records what its random numbers reach. Of that, what differs by more than rounding is
random: a little noise is, and what is undone, as an order of the rows, is not. Of the rest only what differs by much
is: random numbers of Python, but not a sum in another order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.graph.requested import requested_outputs
from modelexport.runtime.choices import Choice
from modelexport.runtime.evidence import Computed, Decision, Evidence, RandomPart, SeenTensor
from modelexport.verify.differences import UNITS, Difference, unequal_infinities, worst
from modelexport.verify.drawing import draws_numbers
from modelexport.verify.outputs import WholeComparison
from modelexport.verify.verdicts import CallVerdict, OtherInputs

_REASON = "it depends on random numbers"
_UNDONE = 8
"""How far two runs are apart, in units of roundoff, if random numbers are undone: a quarter of the tolerance."""
_FAR_APART = 1e-5
"""The same, in norms, of what no random numbers reach: threads may sum in another order, which excuses no fault."""


@dataclass(frozen=True)
class Repeatable:
    """A run without the tensors that depend on random numbers."""

    run: Evidence
    left_out: frozenset[int]
    """The positions of those tensors."""
    random_outputs: frozenset[int]
    """The positions of the file's outputs that do."""
    tensors: Sequence[SeenTensor]
    computed: Sequence[Computed]
    choices: Sequence[Choice]
    decisions: Sequence[Decision] = ()
    """None: what decides may be random."""

    @property
    def quiet(self) -> Sequence[Computed]:
        return self.run.quiet

    @property
    def random(self) -> RandomPart:
        tensors = [tensor for index, tensor in enumerate(self.run.tensors) if index in self.left_out]
        return replace(self.run.random, tensors=tensors)

    @property
    def outputs(self) -> Sequence[Any]:
        return self.run.outputs

    @property
    def parents(self) -> Mapping[ModuleCall, ModuleCall | None]:
        return self.run.parents

    def array(self, content: str) -> Any:
        return self.run.array(content)

    def in_float64(self, given: Collection[str] = ()) -> Evidence | None:
        return self._without_random(self.run.in_float64(given))

    def rounded_otherwise(self, given: Collection[str] = ()) -> Evidence | None:
        return self._without_random(self.run.rounded_otherwise(given))

    def _without_random(self, again: Evidence | None) -> Evidence | None:
        if again is None:
            return None
        tensors = _others(again.tensors, self.left_out)
        return replace(self, run=again, tensors=tensors, computed=again.computed, choices=again.choices)

    def without_outputs(self, whole: WholeComparison) -> WholeComparison:
        """A comparison without the outputs that depend on random numbers."""
        compared = [without(other, self.random_outputs) for other in whole.others.compared]
        others = replace(whole.others, compared=compared)
        return replace(whole, run=self, outputs=_excused(whole.outputs, self.random_outputs), others=others)

    def explained(self, calls: Sequence[CallVerdict]) -> list[CallVerdict]:
        """Verdicts that say why a call was not compared."""
        random = {self.run.tensors[index].call.address for index in self.left_out}
        return [
            msgspec.structs.replace(call, reason="what it computes depends on random numbers")
            if call.status == "not compared" and call.address in random
            else call
            for call in calls
        ]


def without_random(run: Evidence, others: Sequence[Evidence], model: ir.Model) -> Repeatable | None:
    """A run without what differs in other ones, on the same inputs with other random numbers.

    Args:
        model: The file.

    Returns:
        ``None`` if nothing differs.
    """
    drawn = draws_numbers(model)
    random: set[int] = set()
    computed, choices = list(run.computed), list(run.choices)
    for other in others:
        there = {tensor.place: tensor for tensor in other.tensors}
        random.update(
            index
            for index, tensor in enumerate(run.tensors)
            if _differs(run, tensor, other, there.get(tensor.place), drawn)
        )
        alike = len(run.computed) == len(other.computed) and len(run.choices) == len(other.choices)
        pairs = zip(run.computed, other.computed, strict=True) if alike else ()
        same = {id(one) for one, twin in pairs if _is_near(one, twin, drawn)}
        computed = [one for one in computed if id(one) in same or not (alike or one.random is not False)]
        made = {id(one) for one, twin in zip(run.choices, other.choices, strict=True) if one == twin} if alike else ()
        choices = [one for one in choices if id(one) in made]
    outputs = random_outputs(run.outputs, [other.outputs for other in others], model, run)
    if not random and not outputs and len(computed) == len(run.computed) and len(choices) == len(run.choices):
        return None
    return Repeatable(run, frozenset(random), outputs, _others(run.tensors, random), computed, choices)


def _differs(run: Evidence, tensor: SeenTensor, other: Evidence, twin: SeenTensor | None, drawn: bool) -> bool:
    if twin is None or twin.shape != tensor.shape:
        return True
    if twin.content == tensor.content:
        return False
    limit = _apart_by_rounding(tensor.random, drawn, tensor.dtype)
    return _apart(run.array(tensor.content), other.array(twin.content), limit)


def _is_near(one: Computed, other: Computed, drawn: bool) -> bool:
    return one.fingerprint.near(other.fingerprint, _apart_by_rounding(one.random, drawn))


def _apart_by_rounding(random: bool | None, drawn: bool, dtype: str = "float32") -> float:
    """How far apart the numbers of two runs may be, as a share of their size, without being random.

    Args:
        random: Whether random numbers reach them; ``None`` if that is not known.
        drawn: Whether the file draws any.
    """
    return _UNDONE * UNITS.get(dtype, 0.0) if random or (random is None and drawn) else _FAR_APART


def random_outputs(
    outputs: Sequence[Any], others: Sequence[Sequence[Any]], model: ir.Model, run: Evidence | None = None
) -> frozenset[int]:
    """The positions of the file's outputs that differ in other runs.

    Args:
        run: The recorded run that gave the outputs, if it was recorded.
    """
    properties, drawn = model.metadata_props, draws_numbers(model)
    right = requested_outputs(properties, outputs)
    returned = [one.random for one in run.tensors if _is_returned(one, run)] if run is not None else []
    random = requested_outputs(properties, returned if len(returned) == len(outputs) else [None] * len(outputs))
    limits = [_apart_by_rounding(one, drawn, str(array.dtype)) for one, array in zip(random, right, strict=True)]
    found: set[int] = set()
    for other in others:
        twins = requested_outputs(properties, other) if len(other) == len(outputs) else ()
        found.update(
            index
            for index, array in enumerate(right)
            if not twins or array.shape != twins[index].shape or _apart(array, twins[index], limits[index])
        )
    return frozenset(found)


def _is_returned(tensor: SeenTensor, run: Evidence) -> bool:
    """Whether the model returns a tensor."""
    return tensor.side == "outputs" and run.parents[tensor.call] is None


def _others(tensors: Sequence[SeenTensor], random: Collection[int]) -> list[SeenTensor]:
    return [tensor for index, tensor in enumerate(tensors) if index not in random]


def _apart(one: Any, other: Any, limit: float) -> bool:
    """Whether two arrays of one shape differ by more than rounding."""
    if one.dtype.kind in "iub":
        return not np.array_equal(one, other)
    a, b = (array.astype(np.float64).reshape(-1) for array in (one, other))
    nans, infinite, finite = unequal_infinities(a, b)  # a mask of -inf is larger than any noise beside it
    return bool(nans or infinite or np.linalg.norm(a[finite] - b[finite]) > limit * np.linalg.norm(a[finite]))


def _excused(outputs: Sequence[Difference], random: Collection[int]) -> list[Difference]:
    return [
        msgspec.structs.replace(one, status="not compared", reason=_REASON) if index in random else one
        for index, one in enumerate(outputs)
    ]


def without(other: OtherInputs, random: Collection[int]) -> OtherInputs:
    """The comparison of outputs on other inputs without those at some positions."""
    outputs = _excused(other.outputs, random)
    own = worst([one for index, one in enumerate(outputs) if index not in random])
    if not outputs or (other.status == "differ" and own is not None and own.status == "differ"):
        return other
    status, reason = (own.status, own.reason) if own is not None else ("not compared", _REASON)
    return msgspec.structs.replace(other, status=status, reason=reason, outputs=outputs)

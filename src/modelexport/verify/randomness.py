"""What a model computes with random numbers: a file draws others, so that only the rest can be compared.

Which tensors these are is told by runs with other random numbers: several, since a few tokens may be drawn twice. They
are made if the file draws random numbers, or if something differs: then its numbers may be those that were drawn when
the model was captured.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import onnx
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.graph.nodes import all_nodes, is_random
from modelexport.graph.requested import requested_outputs
from modelexport.runtime.choices import Choice
from modelexport.runtime.evidence import Computed, Decision, Evidence, SeenTensor
from modelexport.verify.differences import Difference, worst
from modelexport.verify.outputs import WholeComparison
from modelexport.verify.verdicts import CallVerdict, OtherInputs

_REASON = "it depends on random numbers"
_APART = 2e-7
"""The norm of the difference of two runs, as a share of the tensor's, that is not the rounding of a sum."""
_FAR_APART = 1e-5
"""The same where the file draws no numbers: threads may sum in another order, which must not excuse a fault."""


@dataclass(frozen=True)
class Repeatable:
    """A run without the tensors that depend on random numbers."""

    run: Evidence
    random: frozenset[int]
    """The positions of those tensors."""
    random_outputs: frozenset[int]
    """The positions of the file's outputs that do."""
    tensors: Sequence[SeenTensor]
    computed: Sequence[Computed]
    choices: Sequence[Choice]
    decisions: Sequence[Decision] = ()
    """None: what decides may be random."""

    @property
    def outputs(self) -> Sequence[Any]:
        return self.run.outputs

    @property
    def parents(self) -> Mapping[ModuleCall, ModuleCall | None]:
        return self.run.parents

    def array(self, content: str) -> Any:
        return self.run.array(content)

    def in_float64(self, *, from_right_values: bool) -> Evidence | None:
        exact = self.run.in_float64(from_right_values=from_right_values)
        if exact is None:
            return None
        tensors = _others(exact.tensors, self.random)
        return replace(self, run=exact, tensors=tensors, computed=exact.computed, choices=exact.choices)

    def without_outputs(self, whole: WholeComparison) -> WholeComparison:
        """A comparison without the outputs that depend on random numbers."""
        compared = [without(other, self.random_outputs) for other in whole.others.compared]
        others = replace(whole.others, compared=compared)
        return replace(whole, run=self, outputs=_excused(whole.outputs, self.random_outputs), others=others)

    def explained(self, calls: Sequence[CallVerdict]) -> list[CallVerdict]:
        """Verdicts that say why a call was not compared."""
        random = {self.run.tensors[index].call.address for index in self.random}
        return [
            msgspec.structs.replace(call, reason="what it computes depends on random numbers")
            if call.status == "not compared" and call.address in random
            else call
            for call in calls
        ]


def draws_numbers(model: ir.Model) -> bool:
    """Whether a file has operators that draw random numbers."""
    versions = model.opset_imports
    used = {(node.op_type, node.domain) for node in all_nodes(model)}
    return any(
        is_random(onnx.defs.get_schema(op_type, versions[domain], domain))
        for op_type, domain in used
        if domain in versions and onnx.defs.has(op_type, domain)
    )


def without_random(run: Evidence, others: Sequence[Evidence], model: ir.Model) -> Repeatable | None:
    """A run without what differs in other ones, on the same inputs with other random numbers.

    Args:
        model: The file.

    Returns:
        ``None`` if nothing differs.
    """
    limit = _limit(model)
    random: set[int] = set()
    computed, choices = list(run.computed), list(run.choices)
    for other in others:
        there = {tensor.place: tensor for tensor in other.tensors}
        random.update(
            index
            for index, tensor in enumerate(run.tensors)
            if _differs(run, tensor, other, there.get(tensor.place), limit)
        )
        alike = len(run.computed) == len(other.computed) and len(run.choices) == len(other.choices)
        pairs = zip(run.computed, other.computed, strict=True) if alike else ()
        same = {id(one) for one, twin in pairs if one.fingerprint.near(twin.fingerprint, limit)}
        computed = [one for one in computed if id(one) in same]
        made = {id(one) for one, twin in zip(run.choices, other.choices, strict=True) if one == twin} if alike else ()
        choices = [one for one in choices if id(one) in made]
    outputs = random_outputs(run.outputs, [other.outputs for other in others], model)
    if not random and not outputs and len(computed) == len(run.computed) and len(choices) == len(run.choices):
        return None
    return Repeatable(run, frozenset(random), outputs, _others(run.tensors, random), computed, choices)


def _differs(run: Evidence, tensor: SeenTensor, other: Evidence, twin: SeenTensor | None, limit: float) -> bool:
    if twin is None or twin.shape != tensor.shape:
        return True
    return twin.content != tensor.content and _apart(run.array(tensor.content), other.array(twin.content), limit)


def _limit(model: ir.Model) -> float:
    return _APART if draws_numbers(model) else _FAR_APART


def random_outputs(outputs: Sequence[Any], others: Sequence[Sequence[Any]], model: ir.Model) -> frozenset[int]:
    """The positions of the file's outputs that differ in other runs."""
    properties, limit = model.metadata_props, _limit(model)
    right = requested_outputs(properties, outputs)
    found: set[int] = set()
    for other in others:
        twins = requested_outputs(properties, other) if len(other) == len(outputs) else ()
        found.update(
            index
            for index, array in enumerate(right)
            if not twins or array.shape != twins[index].shape or _apart(array, twins[index], limit)
        )
    return frozenset(found)


def _others(tensors: Sequence[SeenTensor], random: Collection[int]) -> list[SeenTensor]:
    return [tensor for index, tensor in enumerate(tensors) if index not in random]


def _apart(one: Any, other: Any, limit: float) -> bool:
    """Whether two arrays of one shape differ by more than rounding."""
    if one.dtype.kind in "iub":
        return not np.array_equal(one, other)
    a, b = (np.nan_to_num(array.astype(np.float64)) for array in (one, other))
    return bool(np.linalg.norm((a - b).reshape(-1)) > limit * np.linalg.norm(a.reshape(-1)))


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

"""The ``state_dict`` entries that initializers hold or come from after another tool has changed the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from modelexport.format.documents import TransformStep
from modelexport.format.keys import UNRECORDED, UNRECORDED_DOMAIN
from modelexport.format.parameter_plan import ParameterPlan
from modelexport.graph.nodes import initializers
from modelexport.graph.parameter_plans import parameter_plans, record_plan
from modelexport.graph.snapshot import SourceGraph
from modelexport.lineage.owners_by_matching import Descent
from modelexport.weights.entries_of_initializers import Computed
from modelexport.weights.recorded_transforms import compute_planned

_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True)
class Inheritance:
    """What is not known about how the initializers of a changed file are computed."""

    unclear: Mapping[str, Sequence[str]]
    """Initializers whose names do not identify their entries, to all entries that they may come from."""
    shared: Sequence[str] = ()
    """Entries whose initializer has also taken the place of a constant: other weights would change that, too."""


def inherited(tagged: ir.Model, source: SourceGraph, changed: ir.Model, descent: Descent) -> Inheritance:
    """Record how every initializer of a changed file is computed from entries, in place.

    A computation is recorded only if it gives the same bytes: an entry unchanged, transposed or cast, or a value that
    the tagged file computed from it. For any other initializer only its entries are recorded, with the step
    ``Unrecorded``.
    """
    return _Inheritance(tagged, source, changed, descent).run()


@dataclass
class _Inheritance:
    tagged: ir.Model
    source: SourceGraph
    changed: ir.Model
    descent: Descent
    plans: dict[str, ParameterPlan] = field(default_factory=dict)
    computed: Computed | None = None
    shared: set[str] = field(default_factory=set)
    unrecorded: dict[tuple[int, ...], ParameterPlan] = field(default_factory=dict)
    """By the identities of plans."""

    def run(self) -> Inheritance:
        self.plans = {value.name or "": plan for value, plan in parameter_plans(self.tagged).items()}
        plain = {name: tuple(plan.keys) for name, plan in self.plans.items() if not plan.steps}
        self.computed = Computed(self.source, plain, self.tagged.opset_imports)
        unclear: dict[str, list[str]] = {}
        for value in initializers(self.changed):
            plan = self._plan(value)
            if plan is None:
                continue
            record_plan(value, plan)
            step = plan.steps[-1] if plan.steps else None
            if step is None or step.op_type != UNRECORDED:
                continue
            if len(step.inputs) > 1 or self.descent.names.get(value) not in self.plans:
                unclear[value.name or ""] = step.inputs
        return Inheritance(unclear, sorted(self.shared))

    def _plan(self, value: ir.Value) -> ParameterPlan | None:
        name = self.descent.names.get(value, "")
        gone, merged = self.descent.lost.get(value), self.descent.merged.get(value)
        lost = [self.plans[n] for n in gone if n in self.plans] if gone else []
        if name in self.plans:
            plans = [self.plans[n] for n in (name, *(merged or ())) if n in self.plans]
            if merged and any(n in self.source.initializers and n not in self.plans for n in merged):
                self.shared.update(key for plan in plans for key in plan.keys)
            steps = self._recorded(value, name)
            if steps is not None and (len(plans) == 1 or all(_kinds(plan) == _kinds(plans[0]) for plan in plans)):
                return ParameterPlan(list(dict.fromkeys(key for plan in plans for key in plan.keys)), steps)
            return self._unrecorded([*plans, *lost])
        if name in self.source.constant:
            return self._folded(value, name)
        # Shapes, axes and flags do not come from parameters, even if a parameter was lost near them.
        return self._unrecorded(lost) if lost and value.dtype not in (ir.DataType.INT64, ir.DataType.BOOL) else None

    def _recorded(self, value: ir.Value, name: str) -> list[TransformStep] | None:
        """The steps from the entries to an initializer, if the tagged file has it unchanged, transposed or cast."""
        before, after = self.source.initializers[name], value.const_value
        if before is None or after is None or (value.name != name and before.size != after.size):
            return None
        plan = self.plans[name]
        for more in self._changes(before, after, plan):
            if _same(_applied(more, before.numpy()), after) if more else _content(before) == _content(after):
                return [*plan.steps, *more]
        return None

    def _changes(
        self, before: ir.TensorProtocol, after: ir.TensorProtocol, plan: ParameterPlan
    ) -> Iterator[list[TransformStep]]:
        """Candidates for the steps that turn one tensor into the other, the simplest first."""
        cast: dict[str, dict[str, Any]] = {}
        if before.dtype != after.dtype:
            if before.dtype not in _FLOATS or after.dtype not in _FLOATS:
                return
            cast = {"Cast": {"to": int(after.dtype)}}
        shape, wanted = tuple(before.shape.numpy()), tuple(after.shape.numpy())
        if not cast and shape == wanted:
            yield []
        if shape == wanted and cast:
            yield self._steps(cast, plan)
        if len(shape) == 2 and shape[::-1] == wanted:
            yield self._steps({"Transpose": {"perm": [1, 0]}, **cast}, plan)

    def _steps(self, operators: Mapping[str, dict[str, Any]], plan: ParameterPlan) -> list[TransformStep]:
        steps: list[TransformStep] = []
        label = f"%{len(plan.steps) - 1}" if plan.steps else plan.keys[0]
        for operator, attributes in operators.items():
            version = onnx.defs.get_schema(
                operator, self.tagged.opset_imports.get("", onnx.defs.onnx_opset_version())
            ).since_version
            steps.append(TransformStep(operator, [label], attributes, int(version)))
            label = f"%{len(plan.steps) + len(steps) - 1}"
        return steps

    def _folded(self, value: ir.Value, name: str) -> ParameterPlan | None:
        """The plan of an initializer that the tool folded and the tagged file computed from parameters."""
        if name not in self.source.producer:
            return None
        plans = [self.plans[parameter] for parameter in self._parameters(name)]
        if not plans:
            return None
        assert self.computed is not None
        if self.computed.recordable.get(name) and value.name == name and all(not plan.steps for plan in plans):
            plan = self.computed.plan(name)
            tensors = {key: self._entry(key) for key in plan.keys}
            if value.const_value is not None and _same(compute_planned(plan, tensors), value.const_value):
                return plan
        return self._unrecorded(plans)

    def _unrecorded(self, plans: Sequence[ParameterPlan]) -> ParameterPlan:
        """The plan of an initializer of which only its entries are known; the same one for all that have the same."""
        names = tuple(map(id, plans))
        if names not in self.unrecorded:
            self.unrecorded[names] = _unrecorded(plans)
        return self.unrecorded[names]

    def _entry(self, key: str) -> np.ndarray:
        name = next(name for name, plan in self.plans.items() if key in plan.keys and not plan.steps)
        tensor = self.source.initializers[name]
        assert tensor is not None
        return tensor.numpy()

    def _parameters(self, name: str) -> list[str]:
        """The initializers with entries that a constant value of the tagged file depends on."""
        parameters: dict[str, None] = {}
        pending, seen = [name], {name}
        while pending:
            current = pending.pop()
            if current in self.plans:
                parameters[current] = None
            index = self.source.producer.get(current)
            for used in self.source.nodes[index].inputs if index is not None else ():
                if used is not None and used not in seen and used in self.source.constant:
                    seen.add(used)
                    pending.append(used)
        return list(parameters)


def _unrecorded(plans: Sequence[ParameterPlan]) -> ParameterPlan:
    groups = list(dict.fromkeys(group for plan in plans for group in plan.groups()))
    step = TransformStep(UNRECORDED, [keys[0] for keys in groups], domain=UNRECORDED_DOMAIN)
    return ParameterPlan(list(dict.fromkeys(key for keys in groups for key in keys)), [step])


def _kinds(plan: ParameterPlan) -> list[tuple[str, str]]:
    """The operators of a plan with their attributes, without the entries that they are applied to."""
    return [(step.op_type, str(step.attributes)) for step in plan.steps]


def _applied(steps: Sequence[TransformStep], array: np.ndarray) -> np.ndarray:
    """A transposed or cast array."""
    for step in steps:
        if step.op_type == "Transpose":
            array = array.transpose(step.attributes["perm"])
        else:
            with np.errstate(all="ignore"):
                array = array.astype(ir.DataType(step.attributes["to"]).numpy())
    return array


def _content(tensor: ir.TensorProtocol) -> bytes | list[bytes]:
    return list(tensor.string_data()) if isinstance(tensor, ir.StringTensor) else tensor.tobytes()


def _same(array: np.ndarray, tensor: ir.TensorProtocol) -> bool:
    """Whether an array of numbers equals a tensor, bit for bit."""
    if (
        tensor.dtype == ir.DataType.STRING
        or array.dtype != tensor.dtype.numpy()
        or array.shape != tuple(tensor.shape.numpy())
    ):
        return False
    return bool(np.asarray(array, order="C").tobytes() == tensor.tobytes())

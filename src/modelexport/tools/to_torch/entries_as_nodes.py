"""The entries of a ``state_dict`` as values of the graph: recorded transforms become nodes again.

An initializer that is a transposed weight becomes the weight and a ``Transpose`` in each call that uses it, so that
the code has the entry under its own name and shape. What cannot be computed backwards stays as the file holds it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.core.calls import CallTree, ModuleCall
from modelexport.core.owners import Owner
from modelexport.errors import WeightsError
from modelexport.format.documents import CallEntry, StateDictEntry
from modelexport.format.parameter_plan import ParameterPlan
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import initializers
from modelexport.graph.parameter_plans import listed_entries, parameter_plans
from modelexport.tagged.file import TaggedFile
from modelexport.tools.to_torch.entries_of_other_exporters import entries_of_other_exporter
from modelexport.weights.entries_from_file import recover
from modelexport.weights.packed.repacking import DOMAIN as PACKED
from modelexport.weights.recorded_transforms import decode_tensor, run_steps

Stored = list[tuple[ir.Value, ParameterPlan]]
"""The initializers that an entry is in, with how each is computed."""


@dataclass
class Entries:
    """The ``state_dict`` entries of a file."""

    shapes: dict[str, StateDictEntry]
    """Every entry of the module that was exported."""
    values: dict[ir.Value, str] = field(default_factory=dict)
    """The values of the graph that are entries."""
    arrays: dict[str, Any] = field(default_factory=dict)
    """The numbers of each entry, under the first of its names."""
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The first name of an entry to all of them."""
    given: set[tuple[ir.Value, ModuleCall]] = field(default_factory=set)
    """Constants that a call gets from its caller, as the positions that an embedding is asked for."""
    lost: list[str] = field(default_factory=list)
    """Entries that the graph uses in a form from which they cannot be computed."""
    unnamed: list[str] = field(default_factory=list)
    """Entries with a generated name, because the file does not name them."""


def entries_as_nodes(tagged: TaggedFile) -> Entries:
    """Put the recorded transforms of a model's initializers into its graph, which is changed, and find its entries.

    Those of a file of another exporter: :mod:`modelexport.tools.to_torch.entries_of_other_exporters`.
    """
    model = tagged.model
    plans = {value: plan for value, plan in parameter_plans(model).items() if value.const_value is not None}
    entries = Entries(listed_entries(model) or {})
    if tagged.found_calls is not None:
        plans, entries.shapes, entries.unnamed = entries_of_other_exporter(tagged)
    stored: dict[str, Stored] = defaultdict(list)
    for value, plan in plans.items():
        for key in plan.inputs():
            stored[key].append((value, plan))
        for group in plan.groups():
            entries.names[group[0]] = group
    for key in stored:
        if key not in entries.arrays and key not in entries.lost:
            together = _joined(key, stored)
            arrays = _recovered(together, stored, entries.shapes)
            entries.arrays.update(arrays)
            entries.lost += [each for each in together if each not in arrays]
    by_key: dict[str, ir.Value] = {}
    running = {owner.call for node in model.graph.all_nodes() if (owner := owner_of(node)) is not None}
    listed = {entry.address: entry for entry in tagged.hierarchy.calls} if tagged.hierarchy is not None else {}
    folded = {call: listed.get(str(call)) for call in tagged.calls.by_call if call not in running}
    for value, plan in plans.items():
        if not plan.steps:
            entries.values[value] = plan.keys[0]
            by_key.setdefault(plan.keys[0], value)
    for value, plan in plans.items():
        if (
            plan.steps
            and plan.recorded
            and not value.is_graph_output()
            and not any(s.domain == PACKED for s in plan.steps)
        ) and all(key in entries.arrays for key in plan.inputs()):
            for key in plan.inputs():
                if key not in by_key:
                    by_key[key] = _entry(key, entries.arrays[key])
                    entries.values[by_key[key]] = key
            _insert_steps(value, plan, by_key, entries, tagged.calls, folded)
    return entries


def _joined(key: str, stored: Mapping[str, Stored]) -> list[str]:
    """An entry and those that initializers hold together with it, as the two biases of a recurrent layer."""
    found, pending = dict[str, None](), [key]
    while pending:
        found[pending[-1]] = None
        plans = [plan for _, plan in stored[pending.pop()]]
        pending += [other for plan in plans for other in plan.inputs() if other not in found and other not in pending]
    return list(found)


def _recovered(keys: Sequence[str], stored: Mapping[str, Stored], shapes: dict[str, StateDictEntry]) -> dict[str, Any]:
    """The entries as PyTorch had them, as far as the file has their numbers."""
    plans = {value: plan for key in keys for value, plan in stored[key]}
    whole = {
        plan.keys[0]: value.const_value.numpy() for value, plan in plans.items() if not plan.steps and value.const_value
    }
    try:
        if not all(plan.recorded for plan in plans.values()) or not set(keys) <= shapes.keys():
            return whole
        return recover(
            keys, shapes, [(plan, value.const_value.numpy()) for value, plan in plans.items() if value.const_value]
        )
    except WeightsError:
        return whole


def _entry(key: str, array: Any) -> ir.Value:
    return ir.Value(name=key, shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.from_numpy(array.dtype)))


def _insert_steps(
    value: ir.Value, plan: ParameterPlan, by_key: dict[str, ir.Value], entries: Entries, calls: CallTree,
    without_nodes: Mapping[ModuleCall, CallEntry | None],
) -> None:  # fmt: skip
    """Compute an initializer from its entries: in the call of the entry's module, if that has no other nodes, because
    they were folded, and otherwise in each call that uses the result.
    """
    folded = ModuleCall(plan.inputs()[0].rpartition(".")[0])
    uses = [(use.node, use.idx, owner_of(use.node)) for use in value.uses()]
    traced = without_nodes.get(folded)
    parent = calls[folded].parent if len(plan.inputs()) == 1 and folded in without_nodes else None
    runs_once = parent is not None and any(owner and parent in calls.stack(owner.call) for *_, owner in uses)
    results: dict[Any, ir.Value] = {}
    for node, index, owner in uses:
        graph = value.graph if runs_once else node.graph
        caller = Owner((parent,), owner.evidence) if runs_once and parent and owner else owner
        place = graph, caller.call if caller is not None else None
        if place not in results:
            steps = _step_nodes(value, plan, by_key, entries)
            inside = _steps_of_call(steps, traced, entries) if runs_once else ()
            for step in steps:
                set_owner(step, Owner((folded,), caller.evidence) if step in inside and caller else caller)
            if traced is None or traced.inputs:
                entries.given |= {(each, folded) for step in inside for each in step.inputs if each is not None}
            assert isinstance(graph, ir.Graph)
            graph.insert_before(graph[0], steps)
            results[place] = steps[-1].outputs[0]
        node.replace_input_with(index, results[place])


def _steps_of_call(steps: Sequence[ir.Node], call: CallEntry | None, entries: Entries) -> Sequence[ir.Node]:
    """The steps that ran in a call: up to the one whose result has the shape of the call's, or those with the entry."""
    computed = [step for step in steps if step.op_type != "Constant"]
    shapes = [step.outputs[0].shape for step in computed]
    results = [ir.Shape(tensor.shape) for tensor in call.outputs] if call is not None else []
    if len(results) == 1 and results[0] in shapes:
        return computed[: shapes.index(results[0]) + 1]
    return [step for step in computed if any(each in entries.values for each in step.inputs)]


def _step_nodes(value: ir.Value, plan: ParameterPlan, by_key: dict[str, ir.Value], entries: Entries) -> list[ir.Node]:
    arrays = {key: entries.arrays[key] for key in plan.inputs()}
    zeros = {key: np.broadcast_to(np.zeros((), array.dtype), array.shape) for key, array in arrays.items()}
    results, values, nodes = run_steps(plan.steps, zeros), dict(by_key), []
    for number, step in enumerate(plan.steps):
        labels = [label for label in results if label.startswith(f"%{number}:")]
        attributes = {name: ir.tensor(decode_tensor(given)) if isinstance(given, dict) else given
                      for name, given in step.attributes.items()}  # fmt: skip
        node = ir.node(step.op_type, [values[name] if name else None for name in step.inputs], attributes,
                       domain=step.domain, version=step.version or None, num_outputs=len(labels))  # fmt: skip
        for label, output in zip(labels, node.outputs, strict=True):
            array = results[label]
            kind = "indices" if step.op_type == "Constant" and array.dtype == np.int64 else step.op_type.lower()
            output.name = f"{value.name}.{kind}_{label[1:].removesuffix(':0').replace(':', '_')}"
            output.shape, output.dtype = ir.Shape(array.shape), ir.DataType.from_numpy(array.dtype)
            values[label] = output
        values[f"%{number}"] = node.outputs[0]
        nodes.append(node)
    return nodes


class Constants(dict[ir.Value, ir.TensorProtocol]):
    """The initializers and outputs of ``Constant`` that are not entries.

    Args:
        is_wide: Whether to compute in float64 what the file computes in narrower floating-point types.
    """

    def __init__(self, model: ir.Model, entries: Entries, *, is_wide: bool) -> None:
        super().__init__()
        self.is_wide = is_wide
        self._arrays: dict[ir.Value, Any] = {}
        for value in initializers(model):
            if value not in entries.values and value.const_value is not None:
                self[value] = value.const_value
        for node in model.graph.all_nodes():
            if node.op_type == "Constant" and not node.domain:
                for name, attribute in node.attributes.items():
                    if name == "value":
                        self[node.outputs[0]] = attribute.as_tensor()
                    elif name in _NUMPY_TYPES:
                        self[node.outputs[0]] = ir.tensor(np.array(attribute.value, _NUMPY_TYPES[name]))

    def array(self, value: ir.Value) -> Any:
        """A small constant as an array; ``None`` for others."""
        tensor = self.get(value)
        if tensor is None or tensor.nbytes > KNOWN or tensor.dtype == ir.DataType.STRING:
            return None
        if value not in self._arrays:
            array = tensor.numpy()
            self._arrays[value] = array.astype(np.float64) if self.is_wide and array.dtype.name in NARROW else array
        return self._arrays[value]


SMALL = 64
"""Bytes of a constant that each module that uses it gets for itself."""
KNOWN = 4_096
"""Bytes of a constant whose elements decide how code is written."""
NARROW = ("float32", "float16", "bfloat16")
_NUMPY_TYPES = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}

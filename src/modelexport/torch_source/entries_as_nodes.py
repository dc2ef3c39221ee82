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
from modelexport.format.documents import StateDictEntry, TransformStep
from modelexport.format.parameter_plan import ParameterPlan
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import initializers
from modelexport.graph.parameter_plans import listed_entries, parameter_plans
from modelexport.weights.entries_from_file import recover
from modelexport.weights.packed.repacking import DOMAIN as PACKED
from modelexport.weights.recorded_transforms import decode_tensor, run_operator, tensor_attributes

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


def entries_as_nodes(model: ir.Model, calls: CallTree, *, named: bool = True) -> Entries:
    """Put the recorded transforms of a model's initializers into its graph, which is changed, and find its entries.

    Args:
        named: Whether the file says which initializers are entries. Otherwise all of floating-point numbers are.
    """
    plans = {
        value: plan
        for value, plan in parameter_plans(model).items()
        if (tensor := value.const_value) is not None
        and (named or (tensor.size > 1 and tensor.dtype.is_floating_point() and not _are_scales(value)))
    }
    kept = {key for plan in plans.values() for key in plan.keys}
    entries = Entries({key: entry for key, entry in (listed_entries(model) or {}).items() if named or key in kept})
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
            _insert_steps(value, plan, by_key, entries, calls)
    return entries


def _are_scales(value: ir.Value) -> bool:
    """Whether numbers say how an image is resized."""
    return any(use.node.op_type in ("Resize", "Upsample") and use.idx > 0 for use in value.uses())


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
    value: ir.Value, plan: ParameterPlan, by_key: dict[str, ir.Value], entries: Entries, calls: CallTree
) -> None:
    """Compute an initializer from its entries in each call that uses it, or in the call inside it that was folded."""
    results: dict[Any, ir.Value] = {}
    for node, index in [(use.node, use.idx) for use in value.uses()]:
        owner = owner_of(node)
        place = node.graph, owner.call if owner is not None else None
        if place not in results:
            nodes = _step_nodes(value, plan, by_key, entries)
            folded = _folded_call(plan, owner, calls)
            for step in nodes:
                if folded is not None and step.op_type != "Constant":
                    inputs = [each for each in step.inputs if each is not None]
                    constants = [each for each in inputs if (made := each.producer()) and made.op_type == "Constant"]
                    entries.given |= {(each, folded.call) for each in constants}
                set_owner(step, owner if folded is None or step.op_type == "Constant" else folded)
            assert isinstance(node.graph, ir.Graph)
            node.graph.insert_before(node.graph[0], nodes)
            results[place] = nodes[-1].outputs[0]
        node.replace_input_with(index, results[place])


def _folded_call(plan: ParameterPlan, owner: Owner | None, calls: CallTree) -> Owner | None:
    """The call of the entry's module inside the one that uses the result; its nodes were folded."""
    call = ModuleCall(plan.inputs()[0].rpartition(".")[0])
    if owner is None or len(plan.inputs()) != 1 or call not in calls or calls[call].parent != owner.call:
        return None
    return Owner((call,), owner.evidence)


def _step_nodes(value: ir.Value, plan: ParameterPlan, by_key: dict[str, ir.Value], entries: Entries) -> list[ir.Node]:
    outputs: dict[str, tuple[ir.Value, Any]] = {}
    nodes = []
    for number, step in enumerate(plan.steps):
        inputs = [_input(name, outputs, by_key, entries) for name in step.inputs]
        node = ir.node(step.op_type, [each[0] for each in inputs], _attributes(step), domain=step.domain,
                       version=step.version or None, num_outputs=_count(number, plan.steps))  # fmt: skip
        for place, (output, array) in enumerate(zip(node.outputs, _shapes(node, step, inputs), strict=False)):
            output.name = f"{value.name}_{number}" if place == 0 else f"{value.name}_{number}_{place}"
            output.shape, output.dtype = ir.Shape(array.shape), ir.DataType.from_numpy(array.dtype)
            outputs[f"%{number}:{place}"] = (output, array)
        outputs[f"%{number}"] = outputs[f"%{number}:0"]
        nodes.append(node)
    return nodes


def _count(number: int, steps: Sequence[TransformStep]) -> int:
    """How many outputs of a step are used."""
    used = [name for step in steps for name in step.inputs if name.startswith(f"%{number}:")]
    return max([int(name.partition(":")[2]) for name in used], default=0) + 1


def _input(
    name: str, outputs: dict[str, tuple[ir.Value, Any]], by_key: dict[str, ir.Value], entries: Entries
) -> tuple[ir.Value | None, Any]:
    if not name or name in outputs:
        return outputs.get(name, (None, None))
    array = entries.arrays[name]
    return by_key[name], np.broadcast_to(np.zeros((), array.dtype), array.shape)


def _attributes(step: TransformStep) -> dict[str, Any]:
    return {
        name: ir.tensor(decode_tensor(value)) if isinstance(value, dict) else value
        for name, value in step.attributes.items()
    }


def _shapes(node: ir.Node, step: TransformStep, inputs: Sequence[tuple[ir.Value | None, Any]]) -> Sequence[Any]:
    """Arrays with the shapes and types of a step's outputs; those of a constant are its numbers."""
    if step.op_type == "Constant":
        return [decode_tensor(step.attributes["value"])]
    if step.op_type == "Cast":
        dtype = ir.DataType(step.attributes["to"]).numpy()
        return [np.broadcast_to(np.zeros((), dtype), inputs[0][1].shape)]
    attributes = tensor_attributes(node.attributes)
    return run_operator(step.domain, step.op_type, step.version, [array for _, array in inputs], attributes)


def constants_of(model: ir.Model, entries: Entries) -> dict[ir.Value, ir.TensorProtocol]:
    """The initializers and outputs of ``Constant`` that are not entries."""
    found: dict[ir.Value, ir.TensorProtocol] = {}
    for value in initializers(model):
        if value not in entries.values and value.const_value is not None:
            found[value] = value.const_value
    for node in model.graph.all_nodes():
        if node.op_type == "Constant" and not node.domain:
            for name, attribute in node.attributes.items():
                if name == "value":
                    found[node.outputs[0]] = attribute.as_tensor()
                elif name in ("value_int", "value_ints"):
                    found[node.outputs[0]] = ir.tensor(np.array(attribute.value, np.int64))
                elif name in ("value_float", "value_floats"):
                    found[node.outputs[0]] = ir.tensor(np.array(attribute.value, np.float32))
    return found

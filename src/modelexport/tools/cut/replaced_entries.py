"""The ``state_dict`` names of weights after modules were replaced: those of modules that are gone, and new ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from modelexport.format.parameter_plan import ParameterPlan
from modelexport.graph.node_owners import owner_of
from modelexport.graph.parameter_plans import parameter_plan, parameter_plans, record_plan


def write_keys(
    model: ir.Model, changed: Iterable[ir.Value], new: Mapping[ir.Value, Sequence[str]], paths: Sequence[str]
) -> None:
    """Write the names of weights into their metadata.

    Args:
        changed: Weights that have other users than before.
        new: Weights that came with replacements, to their names; not named if there are none.
        paths: The modules that were replaced.
    """
    taken = {key for names in new.values() for key in names}
    for value in changed:
        if value not in new:
            _release(value, taken, [f"{path}." for path in paths])
    for value, names in new.items():
        if names:
            plan = parameter_plan(value)
            record_plan(value, ParameterPlan([*names], plan.steps if plan is not None else []))
    _drop_taken(model, new.keys())


def _release(value: ir.Value, taken: Collection[str], paths: Sequence[str]) -> None:
    """Take the names that belong to modules that are gone from a tensor that other modules still use."""
    plan = parameter_plan(value)
    if plan is None or not any(key.startswith(tuple(paths)) for key in plan.keys):
        return
    users = {call.path for node, _ in value.uses() if (owner := owner_of(node)) for call in owner.calls}
    gone = [path for path in paths if not any(f"{user}.".startswith(path) for user in users)]
    kept: list[str] = []
    renamed: dict[str, str] = {}
    for names in plan.groups():
        left = [key for key in names if key not in taken and not key.startswith(tuple(gone))] or list(names)
        renamed[names[0]] = left[0]
        kept += left
    record_plan(value, ParameterPlan(kept, plan.renamed(renamed)))


def _drop_taken(model: ir.Model, new: Collection[ir.Value]) -> None:
    """Take names from weights of one replaced call if other calls have other tensors of these names.

    No ``state_dict`` holds both, and ``update-weights`` would make them equal.
    """
    plans = parameter_plans(model)
    held = {key: value for value, plan in plans.items() if value not in new for key in plan.keys}
    for value in new:
        if value not in plans:
            continue
        others = [held[key] for key in plans[value].keys if key in held]
        if any(plans[other].steps == plans[value].steps and not _equal(value, other) for other in others):
            record_plan(value, None)


def _equal(value: ir.Value, other_value: ir.Value) -> bool:
    first, second = value.const_value, other_value.const_value
    return first is not None and second is not None and np.array_equal(first.numpy(), second.numpy())

"""Gives a file of another exporter the calls, the parameters and the owners that its model has, found by value.

Such a file may have neither names nor classes, and often not the names of parameters. What it computes is enough: a
node whose value PyTorch computed belongs to the call in which it did.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.core.calls import ROOT, CallTree, ModuleCall, TracedCall
from modelexport.core.module_tree import ModuleTree
from modelexport.core.owners import Evidence, Owner
from modelexport.core.tags import Tags
from modelexport.format.documents import StateDictEntry, TransformStep
from modelexport.format.parameter_plan import ParameterPlan
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import initializers
from modelexport.graph.parameter_plans import (
    lost_entries,
    parameter_plans,
    record_lost,
    record_plan,
    record_state_dict,
    state_dict_of,
)
from modelexport.tagged.file import TaggedFile
from modelexport.tagged.found_calls.owners_from_neighbors import infer_owners
from modelexport.verify.matched_values import Matches


def find_parameters(
    model: ir.Model, entries: Mapping[str, tuple[str, list[int]]], read: Callable[[str], Any], *, within: str = ""
) -> None:
    """Record which entry of the model each initializer is, in place: one of equal elements, best that of its name.

    A weight may be transposed. An entry that no initializer is was folded into another value, or is wrong in the file,
    which the calls show.

    Args:
        entries: Key to element type and shape.
        read: Reads an entry.
        within: The path of the module that the file is, if it was cut out of the model's.
    """
    held = [value for value in initializers(model) if value.const_value is not None]
    for value in held:
        record_plan(value, None)
    plans: dict[ir.Value, ParameterPlan] = {}
    by_content: dict[tuple[Any, ...], ParameterPlan] | None = None
    for value in held:
        name, array = value.name or "", value.const_value
        assert array is not None
        if name in entries and _content(array.numpy()) == _content(read(name)):
            plans[value] = ParameterPlan([name], [])
            continue
        by_content = _by_content(entries, read) if by_content is None else by_content
        if array.size > 1 and (plan := by_content.get(_content(array.numpy()))) is not None:
            plans[value] = plan
    for value, plan in plans.items():
        record_plan(value, plan)
    used = {key for plan in plans.values() for key in plan.keys}
    expected = used | {key for key in entries if f".{key}".startswith(f".{within}." if within else ".")}
    record_state_dict(model, {key: StateDictEntry(*entry, key in expected) for key, entry in entries.items()})
    record_lost(model, [key for key in entries if key in expected - used])


def _content(array: Any) -> tuple[Any, ...]:
    return str(array.dtype), array.shape, hashlib.blake2b(np.ascontiguousarray(array).tobytes()).digest()


def _by_content(entries: Mapping[str, Any], read: Callable[[str], Any]) -> dict[tuple[Any, ...], ParameterPlan]:
    """The entries, and the transposed ones of two dimensions, by their elements; of equal ones the first."""
    by_content: dict[tuple[Any, ...], ParameterPlan] = {}
    for key in entries:
        array = read(key)
        by_content.setdefault(_content(array), ParameterPlan([key], []))
        if array.ndim == 2:
            step = TransformStep("Transpose", [key], {"perm": [1, 0]}, 13)
            by_content.setdefault(_content(array.T), ParameterPlan([key], [step]))
    return by_content


def wrong_parameters(model: ir.Model, entries: Mapping[str, Any], blamed: Container[ModuleCall]) -> list[str]:
    """The initializers with the name of an entry, other elements, and a user in a call that is wrong."""
    plans = parameter_plans(model)
    return [
        value.name or ""
        for value in initializers(model)
        if value.name in entries
        and value not in plans
        and any((owner := owner_of(node)) is not None and owner.call in blamed for node, _ in value.uses())
    ]


def with_calls_of_model(tagged: TaggedFile, modules: ModuleTree, matches: Matches) -> TaggedFile:
    """The file with the calls that the model made, and each node in one of them.

    The owner of a node is, first found first: a call in which PyTorch computed its value; the call of the name that was
    found in the file; the module of a parameter that it uses, or of the one that a wrong weight stands for; the nearest
    call around its neighbors.
    """
    parents = matches.reference.parents
    depths: dict[ModuleCall, int] = {}
    for call, parent in parents.items():
        depths[call] = 0 if parent is None else depths[parent] + 1
    calls = CallTree(tuple(TracedCall(call, parents[call], depth, None, None) for call, depth in depths.items()))
    used = {value: plan.keys[0] for value, plan in parameter_plans(tagged.model).items()}
    used |= _stand_ins(tagged.model)
    for node in tagged.nodes:
        known_owner = owner_of(node)
        named = (
            known_owner.call
            if known_owner is not None and known_owner.call in calls and known_owner.call != ROOT
            else None
        )
        computed = [
            call
            for value in node.outputs
            if matches.is_telling(value)
            for content in matches.equal_in_any_order.get(value, ())
            for call in content.computed
            if call in calls
        ]
        of_weights = [ModuleCall(used[value].rpartition(".")[0]) for value in node.inputs if value in used]
        owner = next((call for call in computed if call == named or call in of_weights), None)
        owner = owner or next(
            (call for call in (*computed, named, *of_weights) if call is not None and call in calls), None
        )
        set_owner(node, None if owner is None else Owner((owner,), Evidence.INFERRED))
    infer_owners(tagged.model, calls)
    return replace(tagged, call_tags=Tags(modules, calls).recorded())


def _stand_ins(model: ir.Model) -> dict[ir.Value, str]:
    """The initializers that are no entry of the model to the entry that they stand for: the only one of this size."""
    plans, entries = parameter_plans(model), state_dict_of(model)
    sizes: dict[tuple[int, ...], tuple[list[ir.Value], list[str]]] = defaultdict(lambda: ([], []))
    for value in initializers(model):
        if value not in plans and value.const_value is not None:
            sizes[tuple(sorted(value.const_value.shape.numpy()))][0].append(value)
    for key in lost_entries(model):
        sizes[tuple(sorted(entries[key].shape))][1].append(key)
    return {values[0]: keys[0] for values, keys in sizes.values() if len(values) == len(keys) == 1}

"""Compares the parameters of a file with a model's, byte by byte, and finds the calls that use wrong ones.

The caller reads the model's, from wherever they are: this file does not know torch.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.text import plural
from modelexport.errors import UsageError
from modelexport.format.parameter_plan import ParameterPlan
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import initializers
from modelexport.graph.parameter_plans import lost_entries, parameter_plan, parameter_plans, state_dict_of
from modelexport.traces.array_differences import compare_arrays
from modelexport.traces.tolerances import COMPUTED_BUFFER
from modelexport.verify.verify_report import CallVerdict, ParameterReport
from modelexport.weights.recorded_transforms import compute_planned

Read = Callable[[str], Any]
"""Reads an entry by its key."""


def check_same_entries(of_model: Mapping[str, tuple[str, list[int]]], model: ir.Model, path: Path) -> None:
    """Refuse a model whose ``state_dict`` lacks entries that a file uses, or has them with other types or shapes.

    Args:
        of_model: Key to element type and shape.
    """
    wanted = {key: (entry.dtype, entry.shape) for key, entry in state_dict_of(model).items() if entry.used}
    differing = [key for key, entry in wanted.items() if of_model.get(key) != entry]
    if differing:
        first = differing[0]
        there, here = wanted[first], of_model.get(first)
        raise UsageError(
            f"this is not the model that {path} was exported from: {plural(len(differing), 'parameter', 'differ')}: "
            f"'{first}' ({there[0]}{there[1]} in the file, {f'{here[0]}{here[1]}' if here else 'none'} in the model)"
        )


def compare_parameters(
    model: ir.Model,
    entries: Collection[str],
    read: Read,
    *,
    is_same_place: Callable[[str, ir.TensorProtocol], bool] = lambda key, tensor: False,
    only: Collection[str] | None = None,
) -> ParameterReport:
    """Compare the initializers of a file, or only those in ``only``, with a model's entries, bit for bit.

    Args:
        entries: The keys of the model's entries.
        is_same_place: Whether an entry and an initializer are the same bytes of a file, which need not be read then.
    """
    is_plain: dict[str, bool] = {}
    differing = []
    for value, plan in _planned(model):
        if only is not None and value.name not in only:
            continue
        for key in plan.keys:
            is_plain[key] = is_plain.get(key, False) or not plan.steps
        tensor = value.const_value
        assert tensor is not None
        if not plan.steps and is_same_place(plan.keys[0], tensor):
            continue
        known = all(key in entries for key in plan.keys)
        array = tensor.numpy()
        if not known or not _same(plan, read, array):
            differing.append(value.name or "")
    stated = {
        key: entry for key, entry in state_dict_of(model).items() if prod(entry.shape)
    }  # of no element is nothing
    used = [key for key, entry in stated.items() if entry.used and (only is None or key in is_plain)]
    untraced = untraced_entries(model)
    return ParameterReport(
        used=len(used),
        transformed=sum(not is_plain.get(key, True) for key in used),
        unaccounted=[key for key in used if key not in is_plain and key not in untraced],
        differing=differing,
        untraced=[key for key in used if key not in is_plain and key in untraced],
    )


def differing_buffers(model: ir.Model, read: Read, names: Collection[str]) -> list[str]:
    """The initializers with the names of buffers that are in no ``state_dict``, and with other numbers than these.

    They are computed where the model is built. That may be another machine, which rounds otherwise, so rounding is
    allowed. All rows of a table are compared, since the runs may not read some of them. A buffer of another shape or
    type was changed by another tool, and is left out.

    Args:
        names: Those of the buffers.
    """
    differing = []
    for value in initializers(model):
        tensor, name = value.const_value, value.name or ""
        if name in names and tensor is not None and parameter_plan(value) is None:
            own_array, array = read(name), tensor.numpy()
            if (own_array.shape, own_array.dtype) == (array.shape, array.dtype) and not _equal(own_array, array):
                differing.extend(
                    [name] if compare_arrays(name, own_array, array, allowed=COMPUTED_BUFFER).status == "differ" else []
                )
    return differing


def untraced_entries(model: ir.Model) -> set[str]:
    """The entries of which a file says that another tool folded, packed or quantized them."""
    packed = {key for plan in parameter_plans(model).values() if not plan.recorded for key in plan.keys}
    return packed | set(lost_entries(model))


def merged_entries(model: ir.Model, is_tied: Callable[[str, str], bool]) -> set[str]:
    """The entries that are one initializer, and not one tensor in the model: another tool merged equal ones."""
    return {
        key
        for _, plan in _planned(model)
        for key in plan.keys
        if not any(is_tied(key, input_key) for input_key in plan.inputs())
    }


def _planned(model: ir.Model) -> Iterator[tuple[ir.Value, ParameterPlan]]:
    """The initializers whose computation from entries is known: steps of other tools cannot be repeated."""
    for value, plan in parameter_plans(model).items():
        if plan.recorded and value.const_value is not None:
            yield value, plan


def _same(plan: ParameterPlan, read: Read, actual: Any) -> bool:
    expected = compute_planned(plan, {key: read(key) for key in plan.inputs()})
    if not _equal(expected, actual):
        return False
    # All names of a tied parameter have the same tensor. Which name is of which of several is not known.
    tied = plan.groups() if len(plan.inputs()) == 1 else []
    return all(_equal(read(key), read(names[0])) for names in tied for key in names[1:])


def _equal(first: Any, second: Any) -> bool:
    """Whether two arrays are equal bit for bit: NaN equals itself, and 0 is not -0."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if (first.ctypes.data, first.strides) == (second.ctypes.data, second.strides):  # tied, or compared in the file
        return True
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}.get(first.dtype.itemsize)
    if bits is None:
        return bool(first.tobytes() == second.tobytes())
    a, b = first.reshape(-1).view(bits), second.reshape(-1).view(bits)
    return bool(np.array_equal(a, b))


Users = Mapping[ModuleCall, Sequence[tuple[int, str]]]
"""Calls to the initializers that their nodes use, each after the position of the node."""


def users_of(nodes: Sequence[ir.Node], names: Collection[str]) -> Users:
    """The calls whose nodes use these initializers."""
    users: dict[ModuleCall, list[tuple[int, str]]] = defaultdict(list)
    for position, node in enumerate(nodes):
        owner, used = owner_of(node), [value.name or "" for value in node.inputs if value is not None]
        for call in owner.calls if owner is not None else ():
            users[call] += [(position, name) for name in used if name in names]
    return users


def with_verdicts_of_weights(calls: Sequence[CallVerdict], users: Users, whose: str) -> list[CallVerdict]:
    """Verdicts on calls, in which those whose nodes use other weights differ.

    Args:
        users: The calls, to the initializers that are others.
        whose: The weights that they should be.
    """

    def with_weights(call: CallVerdict) -> CallVerdict:
        used = users.get(ModuleCall.parse(call.address))
        if not used or call.status == "differ":
            return call
        reason = f"its weights differ from {whose}: {', '.join(dict.fromkeys(name for _, name in used))}"
        return msgspec.structs.replace(call, status="differ", reason=reason, position=used[0][0])

    return [with_weights(call) for call in calls]


def perturbable(model: ir.Model) -> set[str]:
    """The floating-point entries that can be replaced in a file consistently, in all their uses."""
    used: set[str] = set()
    barred: set[str] = set()
    for value, plan in parameter_plans(model).items():
        if plan.recorded and value.dtype is not None and value.dtype.is_floating_point():
            used.update(plan.keys)
        else:
            barred.update(plan.keys)
    return used - barred


def parameter_digests(model: ir.Model) -> dict[str, str]:
    """Digests to check whether two files of one model have the same weights: entries to a digest of the bytes."""
    return {
        json.dumps([plan.keys, len(plan.steps)]): hashlib.blake2b(
            value.const_value.tobytes(), digest_size=12
        ).hexdigest()
        for value, plan in _planned(model)
        if value.const_value is not None
    }

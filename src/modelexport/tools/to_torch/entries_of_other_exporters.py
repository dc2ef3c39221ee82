"""The entries of a file of another exporter: what its initializers are called in a ``state_dict`` of PyTorch.

Exporters fold what they compute from weights alone. ``nn.Linear`` computes ``x @ weight.T + bias``; in the file is the
transposed weight, as ``val_3`` or ``onnx::MatMul_95``. Its node tells the module, and the operator's input the name.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from modelexport.core.limits import CALL_DEPTH
from modelexport.format.documents import StateDictEntry, TransformStep
from modelexport.format.dtypes import dtype_name
from modelexport.format.parameter_plan import ParameterPlan
from modelexport.graph.node_owners import owner_of
from modelexport.graph.parameter_plans import parameter_plan
from modelexport.graph.unique_names import free_name, names_of_initializers
from modelexport.graph.weighted_operators import result_axes, row_of
from modelexport.tagged.file import TaggedFile
from modelexport.tagged.found_calls.find_calls import is_recorded_constant, is_recorded_parameter
from modelexport.tagged.found_calls.recorded_stacks import CallSource

_WITH_ONE_WEIGHT = ("MatMul", "Gemm", "Conv", "ConvTranspose")
"""Operators of modules whose parameters are ``weight`` and ``bias``."""


def entries_of_other_exporter(
    tagged: TaggedFile,
) -> tuple[dict[ir.Value, ParameterPlan], dict[str, StateDictEntry], list[str]]:
    """The initializers of floating-point numbers as entries, the entries, and the keys of those that the file does not
    name. No two have one name, no part of a name is empty, and none is also that of a module.
    """
    sources = tagged.found_calls.kinds if tagged.found_calls is not None else ()
    of_torch = tagged.model.producer_name == "pytorch" and CallSource.TORCH_METADATA not in sources
    names = {
        value: name
        for value, name in names_of_initializers(tagged.model).items()
        if _is_weight(value, name, of_torch=of_torch)
    }
    made_up = {value: name for value, name in names.items() if _is_made_up(value, name)}
    named = {
        value: ".".join(part or "_" for part in names[value].split(".")) for value in names if value not in made_up
    }
    taken = {call.path for call in tagged.calls.by_call}
    taken |= {key[:end] for key in named.values() for end, letter in enumerate(key) if letter == "."} | {""}
    plans = {value: ParameterPlan([free_name(key, taken)]) for value, key in named.items()}
    entries = {}
    for value, name in made_up.items():
        path, role, is_transposed = _use(value)
        own = "_".join(part or "_" for part in name.split("."))
        key = free_name(f"{path}.{role or own}".lstrip("."), taken)
        step = TransformStep("Transpose", [key], {"perm": [1, 0]}, 13)
        plans[value] = ParameterPlan([key], [step] if is_transposed else [])
    for value, plan in plans.items():
        assert value.const_value is not None
        shape = list(value.const_value.shape.numpy())[:: -1 if plan.steps else 1]
        entries[plan.keys[0]] = StateDictEntry(dtype_name(value.const_value.dtype), shape, True)
    return plans, entries, [plans[value].keys[0] for value in made_up]


def _is_weight(value: ir.Value, name: str, *, of_torch: bool) -> bool:
    """Whether a tensor is a parameter or a buffer: all finite, and not said to be constant.

    A single number, which most often is a constant, has to be recorded as an entry, have the name of one, or be a bias.

    Args:
        of_torch: Whether the TorchScript exporter wrote the file, which gives other numbers no names but numbers.
    """
    tensor = value.const_value
    if tensor is None or not tensor.size or not tensor.dtype.is_floating_point():
        return False
    if any(use.node.op_type in ("Resize", "Upsample") and use.idx > 0 for use in value.uses()):  # scales of an image
        return False
    if tensor.size == 1:
        is_named = _is_path(name) and ("." in name or (of_torch and not name[-1:].isdigit()))
        if not is_recorded_parameter(value) and not is_named and _use(value)[1] != "bias":
            return False
    elif parameter_plan(value) is not None:
        return True
    return bool(value.uses()) and not is_recorded_constant(value) and bool(np.isfinite(tensor.numpy()).all())


def _is_made_up(value: ir.Value, name: str) -> bool:
    """Whether an exporter made a name up: attributes cannot have it, or it is that of a folded value in no module."""
    return not _is_path(name) or ("." not in name and parameter_plan(value) is None)


def _is_path(name: str) -> bool:
    """Whether attributes of modules can have a name."""
    return name.count(".") <= CALL_DEPTH and all(
        part.isidentifier() or part.isdigit() for part in name.split(".") if part
    )


def _use(value: ir.Value) -> tuple[str, str, bool]:
    """The path of the module whose nodes use an initializer, if that is one; what it is for them, as far as operators
    tell; and whether they use it transposed.
    """
    uses = [(use.node, use.idx) for use in value.uses()]
    paths = {owner.call.path for node, _ in uses if (owner := owner_of(node)) is not None}
    rows = [(row_of(node) if node.op_type in _WITH_ONE_WEIGHT else None, index) for node, index in uses]
    roles = {
        "weight" if row and index == row.weight else "bias" if row and index == row.bias else "" for row, index in rows
    }
    path = paths.pop() if len(paths) == 1 else ""
    role = roles.pop() if len(roles) == 1 and path else ""
    is_matrix = role == "weight" and value.const_value is not None and len(value.const_value.shape) == 2
    return path, role, is_matrix and all(result_axes(node) == (-1,) for node, _ in uses)

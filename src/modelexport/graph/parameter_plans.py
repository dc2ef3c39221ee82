"""How the initializers of a model are computed from ``state_dict`` entries, and the entries of the exported module."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from modelexport.errors import FileFormatError
from modelexport.format.documents import StateDictEntry
from modelexport.format.dtypes import dtype_name
from modelexport.format.keys import ADAPTER, LOST, PARAMETER, STATE_DICT
from modelexport.format.parameter_plan import AdapterInput, ParameterPlan
from modelexport.graph.nodes import initializers
from modelexport.graph.properties import record
from modelexport.graph.unique_names import names_of_initializers


def parameter_plan(value: ir.Value) -> ParameterPlan | None:
    """How an initializer is computed; ``None`` if it does not come from an entry."""
    return value.meta.get(PARAMETER)


def parameter_plans(model: ir.Model) -> dict[ir.Value, ParameterPlan]:
    """The initializers of a model that come from entries, with how each is computed."""
    return {value: plan for value in initializers(model) if (plan := parameter_plan(value)) is not None}


def used_keys(model: ir.Model) -> set[str]:
    """The keys of the entries that initializers of a model are computed from."""
    return {key for plan in parameter_plans(model).values() for key in plan.keys}


def record_plan(value: ir.Value, plan: ParameterPlan | None) -> None:
    """Let an initializer carry how it is computed, or that it does not come from an entry."""
    record(value, PARAMETER, plan)


def adapter_input(value: ir.Value) -> AdapterInput | None:
    """What an initializer is a part of that is an optional input for adapters; ``None`` if it is not one."""
    return value.meta.get(ADAPTER)


def record_adapter_input(value: ir.Value, what: AdapterInput) -> None:
    """Let an initializer carry what it is a part of as an optional input for adapters."""
    record(value, ADAPTER, what)


def listed_entries(model: ir.Model) -> dict[str, StateDictEntry] | None:
    """The ``state_dict`` entries of the exported module; ``None`` if nothing lists them."""
    return model.meta.get(STATE_DICT)


def state_dict_of(model: ir.Model) -> dict[str, StateDictEntry]:
    """The ``state_dict`` entries of the module that a tagged file was exported from."""
    if (entries := listed_entries(model)) is None:
        raise FileFormatError("the file has no list of its module's parameters: export it again")
    return entries


def record_state_dict(model: ir.Model, entries: dict[str, StateDictEntry]) -> None:
    """Let a model carry the ``state_dict`` entries of the exported module."""
    record(model, STATE_DICT, entries)


def record_own_names(model: ir.Model, chosen: Iterable[ir.Value] | None = None) -> None:
    """Record initializers, by default all, as parameters under their own names: those of a file without tags."""
    entries, names = {}, names_of_initializers(model)
    for value in names if chosen is None else chosen:
        if (tensor := value.const_value) is not None and (name := names[value]):
            record_plan(value, ParameterPlan([name]))
            entries[name] = StateDictEntry(dtype_name(tensor.dtype), list(tensor.shape.numpy()), True)
    record_state_dict(model, entries)


def lost_entries(model: ir.Model) -> list[str]:
    """The entries that no initializer comes from any more, or not alone, as the file says that a tool changed."""
    return list(model.meta.get(LOST, ()))


def record_lost(model: ir.Model, lost: list[str]) -> None:
    """Let a model carry the entries that no initializer comes from any more."""
    record(model, LOST, lost)

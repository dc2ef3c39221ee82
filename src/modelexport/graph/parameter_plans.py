"""How initializers are computed from ``state_dict`` entries: values in memory, text in a file only.

A plan is in the ``meta`` of its ``ir.Value``, the entries of the exported module are in that of the ``ir.Model``, with
other records that a file has of itself: the outputs that it keeps, what was replaced in it, where it was cut out. Only
:func:`read_plans` and :func:`plan_properties` know the text that files have for them. A model that was read keeps the
text until a value is recorded, for those who write it with ``onnx_ir``; it is not read again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec
import onnx_ir as ir

from modelexport.core.json_decoding import decode_json
from modelexport.errors import FileFormatError
from modelexport.format.cut_record import CutRecord
from modelexport.format.documents import StateDictEntry, TransformStep
from modelexport.format.dtypes import dtype_name
from modelexport.format.keys import (
    ADAPTER,
    CUT_FROM,
    EXPOSED,
    LOST,
    OUTPUTS,
    PARAMETER,
    REPLACED,
    STATE_DICT,
    TRANSFORM,
    UNRECORDED,
    UNRECORDED_DOMAIN,
)
from modelexport.graph.nodes import held_initializers, initializers


class ParameterPlan(msgspec.Struct, frozen=True):
    """How an initializer is computed from ``state_dict`` entries."""

    keys: list[str]
    """``state_dict`` keys; the names of a tied parameter are adjacent."""
    steps: list[TransformStep] = []
    """The steps of the computation; empty when the initializer is the entry itself."""

    @property
    def recorded(self) -> bool:
        """Whether the steps can be run: a step of another tool is recorded without its computation."""
        return not any((step.domain, step.op_type) == (UNRECORDED_DOMAIN, UNRECORDED) for step in self.steps)

    def inputs(self) -> list[str]:
        """The keys that the steps use: the first name of each parameter."""
        named = {name for step in self.steps for name in step.inputs}
        return [key for key in self.keys if key in named] or self.keys[:1]

    def groups(self) -> list[tuple[str, ...]]:
        """All names of each parameter."""
        starts = [self.keys.index(key) for key in self.inputs()]
        return [tuple(self.keys[a:b]) for a, b in zip(starts, [*starts[1:], None], strict=True)]

    def renamed(self, names: Mapping[str, str]) -> list[TransformStep]:
        """The steps, with other names of the entries that they take."""
        return [msgspec.structs.replace(s, inputs=[names.get(each, each) for each in s.inputs]) for s in self.steps]


AdapterPart = Literal["a", "b", "scale", "whole"]


class AdapterInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an initializer that is an optional input for adapters is a part of."""

    entry: str
    """The ``state_dict`` key of the weight that adapters change."""
    part: AdapterPart
    kind: str = ""
    """How the weight is used: ``linear``, ``table`` or ``convolution``."""


_KINDS: Mapping[str, Any] = {
    STATE_DICT: dict[str, StateDictEntry],
    LOST: list[str],
    PARAMETER: list[str],
    TRANSFORM: list[TransformStep],
    ADAPTER: AdapterInput,
    OUTPUTS: list[bool],
    EXPOSED: list[str],
    REPLACED: dict[str, str],
    CUT_FROM: CutRecord,
}
"""The properties of files that become values in memory, to the types of their content."""


def parameter_plan(value: ir.Value) -> ParameterPlan | None:
    """How an initializer is computed; ``None`` if it does not come from an entry."""
    plan: ParameterPlan | None = value.meta.get(PARAMETER)
    return plan


def parameter_plans(model: ir.Model) -> dict[ir.Value, ParameterPlan]:
    """The initializers of a model that come from entries, with how each is computed."""
    return {value: plan for value in initializers(model) if (plan := parameter_plan(value)) is not None}


def used_keys(model: ir.Model) -> set[str]:
    """The keys of the entries that initializers of a model are computed from."""
    return {key for plan in parameter_plans(model).values() for key in plan.keys}


def record_plan(value: ir.Value, plan: ParameterPlan | None) -> None:
    """Let an initializer carry how it is computed, or that it does not come from an entry."""
    record(value, PARAMETER, plan)
    value.metadata_props.pop(TRANSFORM, None)


def adapter_input(value: ir.Value) -> AdapterInput | None:
    """What an initializer is a part of that is an optional input for adapters; ``None`` if it is not one."""
    what: AdapterInput | None = value.meta.get(ADAPTER)
    return what


def record_adapter_input(value: ir.Value, what: AdapterInput) -> None:
    """Let an initializer carry what it is a part of as an optional input for adapters."""
    record(value, ADAPTER, what)


def listed_entries(model: ir.Model) -> dict[str, StateDictEntry] | None:
    """The ``state_dict`` entries of the exported module; ``None`` if nothing lists them."""
    entries: dict[str, StateDictEntry] | None = model.meta.get(STATE_DICT)
    return entries


def state_dict_of(model: ir.Model) -> dict[str, StateDictEntry]:
    """The ``state_dict`` entries of the module that a tagged file was exported from.

    Raises:
        FileFormatError: The file has no list of entries.
    """
    if (entries := listed_entries(model)) is None:
        raise FileFormatError("the file has no list of its module's parameters: export it again")
    return entries


def record_state_dict(model: ir.Model, entries: dict[str, StateDictEntry]) -> None:
    """Let a model carry the ``state_dict`` entries of the exported module."""
    record(model, STATE_DICT, entries)


def record_own_names(model: ir.Model, chosen: Iterable[ir.Value] | None = None) -> None:
    """Record initializers, by default all, as parameters under their own names: those of a file without tags."""
    entries = {}
    for value in initializers(model) if chosen is None else chosen:
        if (tensor := value.const_value) is not None and value.name:
            record_plan(value, ParameterPlan([value.name]))
            entries[value.name] = StateDictEntry(dtype_name(tensor.dtype), list(tensor.shape.numpy()), True)
    record_state_dict(model, entries)


def lost_entries(model: ir.Model) -> list[str]:
    """The entries that no initializer comes from any more, or not alone, as the file says that a tool changed."""
    return list(model.meta.get(LOST, ()))


def record_lost(model: ir.Model, lost: list[str]) -> None:
    """Let a model carry the entries that no initializer comes from any more."""
    record(model, LOST, lost)


def record(carrier: ir.Value | ir.Model, key: str, content: Any) -> None:
    """Let an initializer or a model carry what a property of a file says, or nothing, in its ``meta``."""
    carrier.meta.pop(key, None)
    if content is not None:
        carrier.meta[key] = content
    carrier.metadata_props.pop(key, None)


def forget_plans(model: ir.Model) -> None:
    """Remove what a model and its initializers carry, in place: it may no longer hold for them."""
    for meta in (model.meta, *(value.meta for value in initializers(model))):
        for key in _KINDS:
            meta.pop(key, None)


def read_plans(model: ir.Model) -> None:
    """Make values of the text in the properties of a model that was read from a file, in place.

    Raises:
        FileFormatError: The text is damaged.
    """
    model.meta.update(_decoded(model.metadata_props, "the file"))
    for value in held_initializers(model):
        content = _decoded(value.metadata_props, f"initializer {value.name}")
        if keys := content.pop(PARAMETER, None):
            content[PARAMETER] = ParameterPlan(keys, content.pop(TRANSFORM, []))
        value.meta.update(content)


def _decoded(properties: Mapping[str, str], what: str) -> dict[str, Any]:
    texts = {key: properties[key] for key in _KINDS if key in properties}
    if texts.get(PARAMETER) == "[]":
        raise FileFormatError(f"{what} has damaged metadata (it comes from no parameter): export it again")
    damaged = f"{what} has damaged metadata: the property"
    return {key: decode_json(text, kind=_KINDS[key], damaged=f"{damaged} {key}") for key, text in texts.items()}


def plan_properties(carrier: ir.Value | ir.Model) -> dict[str, str]:
    """The properties of a file for what an initializer or a model carries."""
    content = {key: carrier.meta[key] for key in _KINDS if carrier.meta.get(key) is not None}
    properties = {key: msgspec.json.encode(each).decode() for key, each in content.items()}
    if (plan := content.get(PARAMETER)) is not None:
        properties[PARAMETER] = json.dumps(plan.keys)
        if plan.steps:
            properties[TRANSFORM] = msgspec.json.encode(plan.steps).decode()
    return properties

"""How initializers are computed from ``state_dict`` entries, as values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from modelexport.format.documents import TransformStep
from modelexport.format.keys import UNRECORDED, UNRECORDED_DOMAIN


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

    @property
    def quantizes(self) -> bool:
        """Whether numbers are rounded to integers on the way."""
        return any(step.op_type == "QuantizeLinear" for step in self.steps)

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


AdapterPart = Literal["a", "b", "whole"]


class AdapterInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an initializer that is an optional input for adapters is a part of."""

    entry: str
    """The ``state_dict`` key of the weight that adapters change."""
    part: AdapterPart
    kind: str = ""
    """How the weight is used: ``linear``, ``table`` or ``convolution``."""

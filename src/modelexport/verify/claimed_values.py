"""Which value of a file is a tensor that the sidecar names one for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from modelexport.runtime.evidence import Evidence, SeenTensor
from modelexport.verify.matching import distance

_ROUNDING = 1e-5
"""Up to here, in norms, two values differ by no more than rounding: then a tensor is either."""


@dataclass(frozen=True)
class ValuesInRun:
    """What the values of a file were in a run, those of its inputs included."""

    inputs: Mapping[str, Any]
    contents: Mapping[str, str]
    """Values to the contents of the PyTorch run that they have."""
    nearest: Mapping[str, str]
    """Values to the contents that they are nearest to, if another value is nearer."""
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    constants: Mapping[str, int] = field(default_factory=dict)
    """Initializers to their numbers of elements."""

    def named(self, claimed: str, its: SeenTensor, evidence: Evidence) -> str:
        """The value that is a tensor: the claimed one unless it is not, and otherwise the first that is.

        A value has the elements, the shape and the type of its tensor. Where no value has all three, because the
        exporter computes in another layout or type, the claimed one must not have other elements.
        """
        if claimed not in self.shapes and self.constants.get(claimed, prod(its.shape)) == prod(its.shape):
            return claimed  # an initializer, or a value of a graph that did not run
        equal = self._is_equal(claimed, its, evidence) if claimed in self.shapes else False
        if equal and self._is_alike(claimed, its):
            return claimed
        right = [
            name for name, content in self.contents.items() if content == its.content and self._is_alike(name, its)
        ]
        if right:
            return right[0]
        if equal is False:
            return next((name for name, content in self.contents.items() if content == its.content), "another tensor")
        return claimed

    def _is_alike(self, name: str, its: SeenTensor) -> bool:
        return (self.shapes.get(name), self.dtypes.get(name)) == (its.shape, its.dtype)

    def _is_equal(self, name: str, its: SeenTensor, evidence: Evidence) -> bool | None:
        """Whether a value has a tensor's elements; ``None`` if its type is another one, or it is not recognized."""
        if name in self.inputs:
            array = self.inputs[name]
            if str(array.dtype) != its.dtype:
                return None
            return distance(evidence.array(its.content), array) <= _ROUNDING
        content = self.contents.get(name, self.nearest.get(name))
        if content is None or content.partition(":")[0] != its.dtype:
            return None
        if content == its.content or distance(evidence.array(content), evidence.array(its.content)) <= _ROUNDING:
            return True
        return False if name in self.contents else None

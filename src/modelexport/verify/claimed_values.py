"""Which value of a file is a tensor that the sidecar names one for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.runtime.evidence import Evidence, SeenTensor
from modelexport.runtime.fingerprints import Fingerprint, fingerprint_of
from modelexport.verify.matching import distance

_ROUNDING = 1e-5
"""Up to here, in norms, two values differ by no more than rounding: then a tensor is either."""
_OTHER = 0.05
"""From here on, in norms, a value has other elements than a tensor, in whatever order."""


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
    constants: Mapping[str, ir.TensorProtocol] = field(default_factory=dict)
    """Initializers to their tensors."""
    calls_taking: Callable[[str], Collection[ModuleCall]] = lambda name: ()
    """Gives the calls with nodes that take a value, and those around them."""
    prints: Mapping[str, Fingerprint] = field(default_factory=dict)
    """The fingerprints of values; empty if some values are wrong, and others therefore not recognized."""

    def named(self, claimed: str, its: SeenTensor, evidence: Evidence) -> str:
        """The value that is a tensor: the claimed one unless it is not, and otherwise the first that is.

        A value has the elements, the shape and the type of its tensor. Where no value has all three, because the
        exporter computes in another layout or type, the claimed one must not have other elements.
        """
        if claimed in self.constants:
            equal = self._is_constant(claimed, its, evidence)
        elif claimed in self.shapes:
            equal = self._is_equal(claimed, its, evidence)
        else:
            return claimed  # a value of a graph that did not run
        if equal and self._is_alike(claimed, its):
            return self._taken(claimed, its, evidence)
        right = next(self._right(its, evidence), None)
        if right is not None:
            return right
        if equal is False:
            return next((name for name, content in self.contents.items() if content == its.content), "another tensor")
        return claimed

    def _taken(self, claimed: str, its: SeenTensor, evidence: Evidence) -> str:
        """A value that is a tensor, or the equal initializer that the call takes if it does not take this one."""
        if claimed not in self.constants or its.side != "inputs" or its.call in self.calls_taking(claimed):
            return claimed
        taken = (name for name in self._right(its, evidence) if its.call in self.calls_taking(name))
        return next(taken, claimed)

    def _right(self, its: SeenTensor, evidence: Evidence) -> Iterator[str]:
        """The values that have all of a tensor: computed ones, inputs and initializers."""
        yield from (n for n, content in self.contents.items() if content == its.content and self._is_alike(n, its))
        for name in self.inputs:
            if self._is_alike(name, its) and self._is_equal(name, its, evidence):
                yield name
        for name in self.constants:
            if self._is_alike(name, its) and self._is_constant(name, its, evidence):
                yield name

    def _is_alike(self, name: str, its: SeenTensor) -> bool:
        if (tensor := self.constants.get(name)) is not None:
            return (tuple(tensor.shape.numpy()), str(tensor.dtype.numpy())) == (its.shape, its.dtype)
        return (self.shapes.get(name), self.dtypes.get(name)) == (its.shape, its.dtype)

    def _is_constant(self, name: str, its: SeenTensor, evidence: Evidence) -> bool | None:
        """Whether an initializer has a tensor's elements, in any order: the exporter may have transposed it."""
        tensor = self.constants[name]
        if tensor.size != prod(its.shape):
            return False
        if str(tensor.dtype.numpy()) != its.dtype:
            return None
        right, found = evidence.array(its.content), tensor.numpy().reshape(-1)
        if distance(right, found) <= _ROUNDING:
            return True
        return not self._is_alike(name, its) and distance(np.sort(right), np.sort(found)) <= _ROUNDING

    def _is_equal(self, name: str, its: SeenTensor, evidence: Evidence) -> bool | None:
        """Whether a value has a tensor's elements; ``None`` if its type is another one, or it is not recognized."""
        if name in self.inputs:
            array = self.inputs[name]
            if str(array.dtype) != its.dtype:
                return None
            return distance(evidence.array(its.content), array) <= _ROUNDING
        content = self.contents.get(name, self.nearest.get(name))
        if content is None:
            return False if self._is_other(name, its, evidence) else None
        if content.partition(":")[0] != its.dtype:
            return None
        if content == its.content or distance(evidence.array(content), evidence.array(its.content)) <= _ROUNDING:
            return True
        return False if name in self.contents else None

    def _is_other(self, name: str, its: SeenTensor, evidence: Evidence) -> bool:
        """Whether a value that is not recognized has other elements than a tensor, whatever the order."""
        own = self.prints.get(name)
        if own is None or not own.telling or self.dtypes.get(name) != its.dtype or own.size != prod(its.shape):
            return False
        right = fingerprint_of(evidence.array(its.content))
        return right.telling and abs(own.norm - right.norm) > _OTHER * max(own.norm, right.norm)

"""Runs of the same calls that show what rounding does: in float64, or rounded otherwise. Calls may get the tensors of
another run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from modelexport.core.calls import ROOT, ModuleCall, Side
from modelexport.pytorch.dispatch_modes import OperationMode
from modelexport.pytorch.private_torch import tree_map
from modelexport.pytorch.random_flow import leaves
from modelexport.pytorch.recorder import Exchange
from modelexport.pytorch.values import NamedTensors, exchanged, has_elements, memory_of
from modelexport.runtime.evidence import Evidence


def tensors_of(right: Evidence, given: Collection[str], running: Mapping[ModuleCall, ModuleCall]) -> Exchange:
    """Make calls get and return tensors of another run, but for what the model itself returns.

    Args:
        given: The contents of these tensors.
        running: The calls of the other run to what the recorder calls them while they run, if that is not the same.
    """
    known = {(running.get(t.call, t.call), t.side, t.name): t for t in right.tensors if t.content in given}

    def exchange(call: ModuleCall, side: Side, tensors: NamedTensors, value: Any) -> Any:
        found = {}
        for name, tensor in tensors if (call, side) != (ROOT, "outputs") else ():
            seen = known.get((call, side, name))
            if seen is not None and tensor.is_floating_point() and tuple(tensor.shape) == seen.shape:
                array = right.array(seen.content).astype(np.float64).reshape(seen.shape)
                found[id(tensor)] = torch.from_numpy(array).to(tensor.dtype)
        return exchanged(value, found)[0]

    return exchange


class AlwaysInFloat64(OperationMode):
    """Makes operations that ask for float32 give float64: code that computes angles in float32 rounds them too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map(_wide_type, (args, kwargs or {}))
        return func(*self.inside(func, given[0]), **given[1])


def _wide_type(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class RoundedOtherwise(OperationMode):
    """Changes results of operations by up to their last bit, as another order of summation does.

    Monte Carlo arithmetic (D. S. Parker, UCLA CSD-970002, 1997), towards zero only: a probability of 1 does not become
    larger. Tensors of whole numbers, which are mostly exact, stay as they are, and so does what is in memory that was
    there before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*self.inside(func, args), **(kwargs or {}))
        before = {memory_of(value) for value in leaves((args, kwargs)) if isinstance(value, torch.Tensor)}
        return tree_map(lambda value: self._changed(value, before), output)

    def _changed(self, value: Any, before: Collection[int | None]) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not has_elements(value):
            return value
        if memory_of(value) in before or bool((value == value.round()).all()):
            return value
        shares = torch.rand(value.shape, generator=self._generator, dtype=torch.float64).to(value.device)
        return (value.double() * (1 - shares * torch.finfo(value.dtype).eps)).to(value.dtype)

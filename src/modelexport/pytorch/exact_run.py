"""A run in float64 of the same calls: nothing is computed in float32, and calls may get the tensors of another run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from modelexport.core.calls import ROOT, ModuleCall, Side
from modelexport.pytorch.dispatch_modes import OperationMode
from modelexport.pytorch.private_torch import tree_map
from modelexport.pytorch.recorder import Exchange
from modelexport.pytorch.values import NamedTensors, exchanged
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
                found[id(tensor)] = torch.from_numpy(array)
        return exchanged(value, found)[0]

    return exchange


class AlwaysInFloat64(OperationMode):
    """Makes operations that ask for float32 give float64: code that computes angles in float32 rounds them too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map(_wide_type, (args, kwargs or {}))
        return func(*self.inside(func, given[0]), **given[1])


def _wide_type(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value

"""A run in float64 of the same calls: nothing is computed in float32, and calls may get the tensors of another run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from modelexport.core.calls import ROOT, ModuleCall, Side
from modelexport.pytorch.dispatch_modes import OperationMode
from modelexport.pytorch.private_torch import tree_map
from modelexport.pytorch.recorder import CallRecorder
from modelexport.pytorch.values import NamedTensors, input_tensors, output_tensors
from modelexport.runtime.evidence import Evidence


@contextlib.contextmanager
def given_tensors_of(
    model: nn.Module, right: Evidence, running: Mapping[ModuleCall, ModuleCall], recorder: CallRecorder
) -> Iterator[None]:
    """Make each call of a copy of a model get and return the tensors of another run, inside the block.

    Hooks that were there before see what there is without it; those of the recorder are among them.

    Args:
        running: The calls of the other run to what the recorder calls them while they run, if that is not the same.
    """
    known = {(running.get(t.call, t.call), t.side, t.name): t for t in right.tensors}
    stack: list[ModuleCall | None] = []

    def replaced(named: NamedTensors, call: ModuleCall | None, side: Side) -> dict[int, torch.Tensor]:
        found = {}
        for name, tensor in named:
            seen = known.get((call, side, name)) if call is not None else None
            if seen is not None and tensor.is_floating_point() and tuple(tensor.shape) == seen.shape:
                array = right.array(seen.content).astype(np.float64).reshape(seen.shape)
                found[id(tensor)] = torch.from_numpy(array)
        return found

    def exchange(value: Any, found: Mapping[int, torch.Tensor]) -> Any:
        return tree_map(lambda part: found.get(id(part), part), value)

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = recorder.running
        stack.append(call)
        found = replaced(input_tensors(module, args, kwargs), call, "inputs")
        return exchange(args, found), exchange(kwargs, found)

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        call = stack.pop()
        return output if call == ROOT else exchange(output, replaced(output_tensors(output), call, "outputs"))

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class AlwaysInFloat64(OperationMode):
    """Makes operations that ask for float32 give float64: code that computes angles in float32 rounds them too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map(_wide_type, (args, kwargs or {}))
        return func(*self.inside(func, given[0]), **given[1])


def _wide_type(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value

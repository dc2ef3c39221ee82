"""Makes calls of a model get and return other tensors than it computes: those of another run, with larger numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from modelexport.core.calls import ModuleCall, Side
from modelexport.pytorch.recorder import CallRecorder
from modelexport.pytorch.values import NamedTensors, as_array, exchanged
from modelexport.runtime.evidence import Place, Replaced


def spread(tensor: torch.Tensor, typical: float = 0.0) -> torch.Tensor:
    """Each number times one of a few factors, some of which are above one and one is zero; none that is infinite.

    Args:
        typical: The root mean square that the numbers have before, if it is not to stay as it is.
    """
    factors = torch.tensor(_FACTORS, dtype=torch.float64, device=tensor.device)
    if typical and (size := float(tensor[tensor.abs() < _HUGE].double().square().mean().sqrt())) > 0:
        factors *= typical / size
    places = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape)
    return torch.where(tensor.abs() < _HUGE, (tensor * factors[places % len(_FACTORS)]).to(tensor.dtype), tensor)


_FACTORS = (4.0, 1.0, 0.5, 2.0, 0.0, 1.0, 3.0)
"""As many as no usual size is a multiple of, and all of them exact in every type."""
_HUGE = 1e4
"""Larger numbers stand for infinity, in half precision, too."""


def spread_array(array: Any, typical: float) -> Any:
    """As :func:`spread`, for an array of NumPy."""
    return as_array(spread(_as_tensor(array), typical))


@contextlib.contextmanager
def replaced_tensors(model: nn.Module, others: Mapping[Place, Any], watched: Collection[Place]) -> Iterator[Replaced]:
    """Replace tensors that calls get and return, inside the block.

    Tensors of another shape or type than their replacements stay as they are, and so do those in objects that PyTorch
    does not look into.

    Args:
        others: Where a tensor is replaced, to an array of its shape.
        watched: Further places.
    """
    run, places = Replaced(), {*others, *watched}

    def exchange(call: ModuleCall, side: Side, tensors: NamedTensors, value: Any) -> Any:
        here, found = {}, {}
        for name, tensor in tensors:
            place = Place(call, side, name)
            if place in places and not tensor.is_complex():
                run.computed[place] = array = as_array(tensor).copy()
                other = others.get(place)
                if other is not None and (other.shape, other.dtype) == (array.shape, array.dtype):
                    here[place], found[id(tensor)] = id(tensor), _as_tensor(other).to(tensor.device)
        value, reached = exchanged(value, found)
        run.places.update(place for place, tensor in here.items() if tensor in reached)
        return value

    with CallRecorder(model, exchange=exchange).attached():
        yield run


def _as_tensor(array: Any) -> torch.Tensor:
    """A copy of an array that :func:`as_array` made."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))

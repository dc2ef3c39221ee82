"""Makes calls of a model get and return other tensors than it computes: those of another run, with larger numbers."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from modelexport.core.calls import ModuleCall
from modelexport.pytorch.model_run import as_array
from modelexport.pytorch.private_torch import tree_map
from modelexport.pytorch.values import NamedTensors, has_elements, input_tensors, output_tensors
from modelexport.runtime.evidence import Place


def spread(tensor: torch.Tensor, typical: float = 0.0) -> torch.Tensor:
    """Each number times one of a few factors, some of which are above one and one is zero; none that is infinite.

    Args:
        typical: The root mean square that the numbers have before, if it is not to stay as it is.
    """
    factors = torch.tensor(_FACTORS, dtype=tensor.dtype, device=tensor.device)
    if typical and (size := float(tensor[tensor.abs() < _HUGE].double().square().mean().sqrt())) > 0:
        factors *= typical / size
    places = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape)
    return torch.where(tensor.abs() < _HUGE, tensor * factors[places % len(_FACTORS)], tensor)


_FACTORS = (4.0, 1.0, 0.5, 2.0, 0.0, 1.0, 3.0)
"""As many as no usual size is a multiple of, and all of them exact in every type."""
_HUGE = 1e4
"""Larger numbers stand for infinity, in half precision, too."""


def spread_array(array: Any, typical: float) -> Any:
    """As :func:`spread`, for an array of NumPy."""
    return as_array(spread(_as_tensor(array), typical))


@contextlib.contextmanager
def replaced_tensors(
    model: nn.Module, others: Mapping[Place, Any], watched: Collection[Place]
) -> Iterator[Mapping[Place, Any]]:
    """Replace tensors that calls get and return, inside the block.

    Tensors of another shape or type than their replacements stay as they are.

    Args:
        others: Where a tensor is replaced, to an array of its shape.
        watched: Further places.

    Returns:
        What the model computed at all these places, which is filled as it runs.
    """
    computed: dict[Place, Any] = {}
    begun: Counter[str] = Counter()
    running: dict[str, list[ModuleCall]] = defaultdict(list)
    places = {*others, *watched}
    calls = {place.call for place in places}

    def seen(call: ModuleCall, side: Any, named: NamedTensors) -> dict[int, torch.Tensor]:
        found = {}
        for name, tensor in named:
            place = Place(call, side, name)
            if place in places and has_elements(tensor) and not tensor.is_complex():
                computed[place] = as_array(tensor).copy()
                other = others.get(place)
                if other is not None and other.shape == tensor.shape and other.dtype == computed[place].dtype:
                    found[id(tensor)] = _as_tensor(other).to(tensor.device)
        return found

    def exchanged(value: Any, found: Mapping[int, torch.Tensor]) -> Any:
        return tree_map(lambda part: found.get(id(part), part), value) if found else value

    def enter(path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = ModuleCall(path, begun[path])
        begun[path] += 1
        running[path].append(call)
        if call not in calls:
            return None
        return exchanged((args, kwargs), seen(call, "inputs", input_tensors(module, args, kwargs)))

    def leave(path: str, module: nn.Module, args: Any, output: Any) -> Any:
        call = running[path].pop()
        return exchanged(output, seen(call, "outputs", output_tensors(output))) if call in calls else None

    with contextlib.ExitStack() as hooks:
        for path in {call.path for call in calls}:
            module = model.get_submodule(path)
            if not isinstance(module, torch.jit.ScriptModule):  # does not accept hooks of its own
                hooks.callback(module.register_forward_pre_hook(partial(enter, path), with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(partial(leave, path)).remove)
        yield computed


def _as_tensor(array: Any) -> torch.Tensor:
    """A copy of an array that :func:`as_array` made."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))

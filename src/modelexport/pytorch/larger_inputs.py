"""Makes some calls of a model get larger and smaller numbers than they are given."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from modelexport.core.calls import ModuleCall
from modelexport.pytorch.private_torch import tree_map
from modelexport.pytorch.values import input_tensors


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


@contextlib.contextmanager
def larger_inputs(
    model: nn.Module, inputs: Mapping[ModuleCall, Collection[str]], typical: float = 0.0
) -> Iterator[None]:
    """Spread the numbers that some calls get, inside the block; hooks that are attached there see them so.

    Args:
        inputs: Calls to the names of tensors that they get.
        typical: As in :func:`spread`.
    """
    begun: Counter[str] = Counter()

    def enter(path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        names = inputs.get(ModuleCall(path, begun[path]), ())
        begun[path] += 1
        larger = {id(one): spread(one, typical) for name, one in input_tensors(module, args, kwargs) if name in names}
        return tree_map(lambda value: larger.get(id(value), value), (args, kwargs))

    with contextlib.ExitStack() as hooks:
        for path in {call.path for call in inputs}:
            module = model.get_submodule(path)
            if not isinstance(module, torch.jit.ScriptModule):  # does not accept hooks of its own
                hook = module.register_forward_pre_hook(partial(enter, path), with_kwargs=True)
                hooks.callback(hook.remove)
        yield

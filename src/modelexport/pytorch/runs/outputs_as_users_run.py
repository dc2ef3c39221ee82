"""What a model returns, as users run it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from modelexport.core.text import error_line
from modelexport.errors import InputsError, raised_as
from modelexport.pytorch.calls.traced_tree import ModelState, untouched
from modelexport.pytorch.nested_tensors import (
    Inputs,
    as_array,
    as_stored,
    has_elements,
    output_tensors,
    run_arguments,
    tensors_in,
)


def returned_by(
    model: nn.Module,
    inputs: Inputs,
    *,
    as_exported: bool = True,
    nudged: bool = False,
    state: ModelState | None = None,
) -> list[Any]:
    """The tensors in what a model returns, in order. It runs in evaluation mode, and is restored afterwards.

    Args:
        as_exported: With masks that hide nothing and without fused operators, as front ends see it.
        nudged: With the last bit of inputs and weights changed, which shows what rounding makes of the result. Whole
            numbers are exact, and stay.
        state: What the model is restored to, by default its state before the run.

    Raises:
        InputsError: The model raised, which a capture may not show: it replaces operations that write into tensors.
    """

    def failed(error: Exception) -> InputsError:
        return InputsError(f"{type(model).__name__} does not run with its inputs: {error_line(error)}")

    args, kwargs = run_arguments(inputs)
    with untouched(model, masks=as_exported, state=state), raised_as(failed):
        given = [tensor for _, tensor in tensors_in([args, kwargs])]
        for tensor in [*given, *model.parameters(), *model.buffers()] if nudged else ():
            if tensor.is_floating_point():
                signs = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape) % 2 * 2 - 1
                moved = tensor.data * (1 + torch.finfo(tensor.dtype).eps * signs).to(tensor.dtype)
                tensor.data = torch.where(tensor.data == tensor.data.round(), tensor.data, moved)
        result = model(*args, **kwargs)
    return [as_array(as_stored(tensor)) for _, tensor in output_tensors(result) if has_elements(tensor)]

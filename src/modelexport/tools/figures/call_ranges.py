"""The range of what each module call returns in PyTorch, by forward hooks."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

import torch
from torch import nn

from modelexport.core.calls import ModuleCall
from modelexport.errors import InputsError
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.nested_tensors import Inputs, run_arguments, tensors_in
from modelexport.traces.value_ranges import ValueRange


def ranges_of_calls(model: nn.Module, inputs: Inputs) -> dict[ModuleCall, ValueRange]:
    """The numbers of the floating-point tensors that each call returns.

    Args:
        inputs: Arguments of ``forward``, by name or by position.
    """
    ranges: dict[ModuleCall, ValueRange] = {}
    counts: Counter[str] = Counter()
    args, kwargs = run_arguments(inputs)
    with untouched(model, runs=False), torch.inference_mode(), ExitStack() as stack:
        for path, module in model.named_modules():

            def leave(module: nn.Module, args: object, output: object, path: str = path) -> None:
                numbers = ranges.setdefault(ModuleCall(path, counts[path]), ValueRange())
                counts[path] += 1
                for _, tensor in tensors_in(output):
                    if tensor.is_floating_point():
                        numbers.add(tensor.detach().to(torch.float64).numpy(), 0)

            stack.callback(module.register_forward_hook(leave).remove)
        try:
            model(*args, **kwargs)
        except Exception as error:  # the code of a model may raise anything
            raise InputsError(f"the model does not run with these inputs: {error}") from error
    return {call: numbers for call, numbers in ranges.items() if numbers.smallest <= numbers.largest}

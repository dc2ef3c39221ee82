"""How long each module call takes in PyTorch, by forward hooks."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import nn

from modelexport.core.calls import ModuleCall
from modelexport.errors import InputsError
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.nested_tensors import Inputs, run_arguments


class _Clock:
    """Times calls while its hooks are attached: nanoseconds of each call itself, without the calls inside it."""

    def __init__(self) -> None:
        self.own: dict[ModuleCall, int] = {}
        self._counts: Counter[str] = Counter()
        self._began: list[int] = []
        self._inside = [0]
        """The time of the calls inside each running call so far, and of those around which none runs."""

    def hooks(self, path: str) -> tuple[Callable[..., None], Callable[..., None]]:
        calls: list[ModuleCall] = []

        def enter(module: nn.Module, args: object) -> None:
            calls.append(ModuleCall(path, self._counts[path]))
            self._counts[path] += 1
            self._inside.append(0)
            self._began.append(time.perf_counter_ns())

        def leave(module: nn.Module, args: object, output: object) -> None:
            taken = time.perf_counter_ns() - self._began.pop()
            self.own[calls.pop()] = taken - self._inside.pop()
            self._inside[-1] += taken

        return enter, leave


def time_calls(model: nn.Module, inputs: Inputs, *, runs: int = 10, warmup: int = 2) -> dict[ModuleCall, int]:
    """Nanoseconds of each call itself, without the calls inside it: the median of several runs.

    Args:
        inputs: Arguments of ``forward``, by name or by position.
    """
    args, kwargs = run_arguments(inputs)
    nanoseconds: dict[ModuleCall, list[int]] = {}
    with untouched(model, runs=False), torch.inference_mode():
        for number in range(warmup + runs):
            clock = _Clock()
            with ExitStack() as stack:
                for path, module in model.named_modules():
                    enter, leave = clock.hooks(path)
                    stack.callback(module.register_forward_pre_hook(enter).remove)
                    stack.callback(module.register_forward_hook(leave).remove)
                try:
                    model(*args, **kwargs)
                except Exception as error:  # the code of a model may raise anything
                    raise InputsError(f"the model does not run with these inputs: {error}") from error
            if number >= warmup:
                for call, taken in clock.own.items():
                    nanoseconds.setdefault(call, []).append(taken)
    return {call: round(statistics.median(taken)) for call, taken in nanoseconds.items()}

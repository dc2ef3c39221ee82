"""Operators that only take numbers for sizes in C++ run with symbolic sizes by PyTorch's definitions in Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.overrides import TorchFunctionMode

from modelexport.capture.patches import private, usable
from modelexport.capture.recorded_conditions import RecordedConditions


class PythonKernels(TorchFunctionMode):
    """Runs a function again with PyTorch's definitions in Python if its own code takes only numbers for sizes.

    With these alone all functions would run as far, but up to a hundred times as long.
    """

    def __init__(self, recorded: RecordedConditions) -> None:
        super().__init__()
        self._recorded = recorded

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not usable("python kernels"):
            return func(*args, **kwargs or {})
        self._recorded.kernels_take_numbers = False
        try:
            return func(*args, **kwargs or {})
        except RuntimeError:
            self._recorded.kernels_take_numbers = True
            with private("python kernels")():
                return func(*args, **kwargs or {})
        finally:
            self._recorded.kernels_take_numbers = True

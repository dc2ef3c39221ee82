"""The base of this package's modes that see every operation of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from modelexport.pytorch.private_torch import TorchDispatchMode

RUN_FUNCTIONS = (torch.ops.higher_order.cond, torch.ops.higher_order.while_loop, torch.ops.higher_order.scan)
"""The operations that run nested functions, as the bodies of branches and loops."""


class OperationMode(TorchDispatchMode):
    """Sees operations inside branches too, and what was compiled runs as before once it is left.

    ``torch.cond`` compiles its branches when it runs. PyTorch gives up compiling under a mode that does not ignore
    that, and remembers it for the code: the same model would fail in every later run of the process.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation here

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled code runs under the mode, which compilation does not see."""
        return True

    def inside(self, func: Any, args: Any) -> Any:
        """The arguments of an operation; if it runs nested functions, their operations are seen by the mode, too."""
        return tuple(map(self._seen_inside, args)) if func in RUN_FUNCTIONS else args

    def _seen_inside(self, value: Any) -> Any:
        return self._entered(value) if callable(value) and not isinstance(value, torch.Tensor) else value

    def _entered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with self:
                return function(*args)

        return run

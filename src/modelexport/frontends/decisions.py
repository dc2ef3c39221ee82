"""Refuses, while a model is traced, Python that decides by the values of tensors: a trace cannot follow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class DecisionError(RuntimeError):
    """The model reads a number that depends on the values of its inputs or parameters."""


# torch is not followed by mypy.
class NoDecisions(TorchFunctionMode):  # type: ignore[misc]
    """Refuses what a trace cannot follow: Python that reads a number which depends on inputs or parameters.

    The trace would keep what was decided for the example inputs, for all others too. Numbers that depend on sizes alone
    are read freely.
    """

    def __init__(self) -> None:
        super().__init__()
        self._depends: dict[int, bool] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _READING and torch._C._get_tracing_state() is not None:
            for tensor in args:
                if isinstance(tensor, torch.Tensor) and self._on_values(torch._C._get_value_trace(tensor)):
                    raise DecisionError(
                        f"data-dependent: {func.__name__}() of a tensor, which a trace keeps as it is for these inputs"
                    )
        return func(*args, **(kwargs or {}))

    def _on_values(self, value: Any) -> bool:
        """Whether a value of the trace depends on elements of inputs or parameters, not only on their sizes."""
        pending = [value]
        while pending:
            current = pending[-1]
            node, number = current.node(), current.unique()
            if number in self._depends:
                pending.pop()
            elif node.kind() == "prim::Param":
                self._depends[number] = True
            elif node.kind() in _SIZES:
                self._depends[number] = False
            else:
                inputs = list(node.inputs())
                unknown = [one for one in inputs if one.unique() not in self._depends]
                if unknown:
                    pending.extend(unknown)
                else:
                    self._depends[number] = any(self._depends[one.unique()] for one in inputs)
        return self._depends[value.unique()]


_READING = {
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__complex__,
    torch.Tensor.__index__,
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.equal,
    torch.equal,
    torch.Tensor.allclose,
    torch.allclose,
}
"""What gives Python numbers of the elements of tensors."""

_SIZES = {"aten::size", "aten::numel", "aten::dim", "aten::len"}

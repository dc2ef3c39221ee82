"""Answers what Python asks of values while a model is captured: as if something were selected, but not everything.

A model may skip the work for what is not selected: ``if mask.any()``, ``if index.numel() == 0``, and a loop over the
rows of ``nonzero()``, as over the experts that a token goes to. The work that is skipped mostly changes nothing if it
is done for nothing, and a file that always does it is right. That it is so is presumed: the lines are noted, an export
tells them, and its check compares on other inputs.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_unbacked_symbols
from torch.overrides import TorchFunctionMode

from modelexport.capture.failure_hints import line_of
from modelexport.capture.patches import replaced
from modelexport.capture.value_decisions import READS_SIZES, READS_VALUES, DecisionError
from modelexport.pytorch.private_torch import (
    DataDependentOutputException,
    FakeTensor,
    tensor_leaves,
    tree_leaves,
    tree_map,
)
from modelexport.pytorch.runs.questions_of_values import Site, TimesAsked, asks, site_of


class Presumed:
    """The lines of the model where something was presumed to be selected."""

    def __init__(self, fixed: Mapping[Site, bool], most: int = 0) -> None:
        self.fixed = fixed
        """Places whose answer is always the same: see :mod:`modelexport.capture.fixed_answers`."""
        self.lines: dict[str, None] = {}
        """``net.py:12``, in the order in which they were reached."""
        self._most = max(most, 1)
        """How often one place asks in a run with the example inputs."""
        self._listed = 0
        """The most that is selected in a list, over which the model may loop."""
        self._times = TimesAsked()
        self._endless = ""
        """The line of a loop that does not end."""

    def list(self, count: int) -> None:
        """Note that a selection is presumed to contain all of ``count`` elements."""
        self._listed = max(self._listed, count)

    def answering(self, capture: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.export.export``, inside of which the questions are answered."""

        def export(*args: Any, **kwargs: Any) -> Any:
            with replaced({"truth": self._truth}), _StandIns(self):
                return capture(*args, **kwargs)

        return export

    def note(self) -> None:
        """Note the line of the model that asks now.

        Raises:
            DecisionError: It asks again and again, as in a loop that ends when nothing is selected.
        """
        times = self._times.note()
        if times <= 1 or times > self._most + self._listed:
            line = line_of(traceback.extract_stack())
            self.lines[line] = None
            self._endless = self._endless or (line if times > 1 else "")
        if self._endless:  # also where the exporter tries another way to capture the model
            raise DecisionError(f"data-dependent: a loop goes on as long as anything is selected ({self._endless})")

    def _truth(self, decided: Callable[[Any], bool]) -> Callable[[Any], bool]:
        """``SymBool.__bool__``, which answers whether a number of selected elements is zero."""

        def truth(asked: Any) -> bool:
            try:
                return decided(asked)
            except DECISIONS:
                expression, sizes = asked.node.expr, asked.node.shape_env
                counts = free_unbacked_symbols(expression)
                by_model = line_of(traceback.extract_stack(sys._getframe(1), limit=1))  # PyTorch asks for other reasons
                are_counts = all(sizes.bound_sympy(count).lower == 0 for count in counts)
                if not by_model or not are_counts or expression.free_symbols != counts:
                    raise
                answer = _if_any(lambda count: bool(expression.subs(dict.fromkeys(counts, count))))
                if answer is None:
                    raise
                self.note()
                return answer

        return truth


def _if_any(asked: Callable[[int], bool]) -> bool | None:
    """The answer for any count but zero, if it is the same for all of them and another for zero."""
    answers = {asked(count) for count in (1, 2, 1_000_000)}
    return answers.pop() if len(answers) == 1 and asked(0) not in answers else None


class _StandIns(TorchFunctionMode):
    """Gives Python constants where it reads the values of a mask: some elements are selected, and not all.

    ``any`` of the mask is true, ``all`` is false, and ``nonzero`` has the indices of all elements. What is
    computed from these alone is such a constant, too.
    """

    def __init__(self, presumed: Presumed) -> None:
        super().__init__()
        self._presumed = presumed
        self._of: dict[int, torch.Tensor] = {}
        self._counts: dict[int, torch.Tensor] = {}
        self._alive: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = tensor_leaves((args, kwargs))
        known = bool(tensors) and all(id(tensor) in self._of for tensor in tensors)
        if tensors and asks(func, args):
            fixed = self._presumed.fixed.get(site_of())
            if fixed is not None:
                return fixed
        if known and func in _READS:
            self._presumed.note()
            return func(*tree_map(self._stand_in, args), **tree_map(self._stand_in, kwargs))
        output = func(*args, **kwargs)
        if known:
            self._stands_for(output, func(*tree_map(self._stand_in, args), **tree_map(self._stand_in, kwargs)))
        elif tensors:
            self._stands_for(output, self._selected(func, output, args))
        return output

    def _selected(self, func: Callable[..., Any], output: Any, args: tuple[Any, ...]) -> Any:
        """The presumed result of a function that selects elements or asks about them; ``None`` for any other one."""
        first: Any = args[0] if args else None
        if not isinstance(first, FakeTensor) or first.constant is not None:  # its values are known
            return None
        if func in _INDICES and len(args) == 1 and first.dim() == 1 and isinstance(first.shape[0], int):
            every = torch.tensor(range(first.shape[0]))
            self._presumed.list(first.shape[0])
            return (every,) if isinstance(output, tuple) else every[:, None]
        if func in _ASKS and isinstance(output, torch.Tensor) and not output.dim():
            return torch.tensor(_ASKS[func])
        if func in _COUNTS and first.dtype is torch.bool and not output.dim():
            self._counts[id(output)] = output
        elif id(first) in self._counts and func in _COMPARISONS and isinstance(args[-1], int):
            answer = _if_any(lambda count: bool(func(torch.tensor(count), args[-1])))
            return None if answer is None else torch.tensor(answer)
        return None

    def _stand_in(self, value: Any) -> Any:
        return self._of.get(id(value), value)

    def _stands_for(self, output: Any, other: Any) -> None:
        for tensor, stand_in in zip(tree_leaves(output), tree_leaves(other), strict=False):
            if isinstance(tensor, torch.Tensor) and isinstance(stand_in, torch.Tensor):
                self._of[id(tensor)] = stand_in
                self._alive.append(tensor)


DECISIONS = (GuardOnDataDependentSymNode, DataDependentOutputException)
"""The exceptions that PyTorch raises where Python reads a value that is not known before the model runs."""

_READS = READS_VALUES | READS_SIZES
_INDICES = {torch.nonzero, torch.Tensor.nonzero, torch.where, torch.Tensor.where}
_ASKS = {torch.any: True, torch.Tensor.any: True, torch.all: False, torch.Tensor.all: False}
_COUNTS = {torch.sum, torch.Tensor.sum, torch.count_nonzero, torch.Tensor.count_nonzero}
_COMPARISONS = {
    *(torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge),
    *(getattr(torch.Tensor, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")),
    *(getattr(torch.Tensor, f"__{name}__") for name in ("eq", "ne", "lt", "le", "gt", "ge")),
}

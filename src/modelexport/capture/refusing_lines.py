"""Finds the questions by which a model refuses inputs: those with whose other answer it raises an error itself.

No front end can follow ``assert mask.any()`` or ``if ids.max() > n: raise ValueError``. Since the model has no output
if the answer is the other one, a graph may take the one of the example.
"""

from __future__ import annotations

import dis
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from modelexport.capture.failure_hints import line_of
from modelexport.capture.value_decisions import asks
from modelexport.core.collected_messages import collected
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.nested_tensors import run_arguments


def refusing_lines(model: nn.Module, inputs: Mapping[str, Any] | Sequence[Any]) -> dict[str, bool]:
    """Lines of the model, ``net.py:12``, to the truth of what they ask, without which the model raises an error.

    Runs the model, and once more for each line that asks. It is as before afterwards.
    """
    args, kwargs = run_arguments(inputs)

    def error_with(answers: _Answers) -> Exception | None:
        with untouched(model), collected(), answers:
            try:
                model(*args, **kwargs)
            except Exception as error:  # of the model, for an answer that was changed
                return error
        return None

    asked = _Answers()
    if error_with(asked) is not None:
        return {}
    same = {line: truths.pop() for line, truths in asked.given.items() if len(truths) == 1}
    return {line: truth for line, truth in same.items() if _raises_itself(error_with(_Answers(line)))}


class _Answers(TorchFunctionMode):
    """Notes what the tensors of a run answer to Python, and changes the answers of one line."""

    def __init__(self, changed: str | None = None) -> None:
        super().__init__()
        self.given: dict[str, set[bool]] = {}
        self._changed = changed

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if not asks(func, args):
            return output
        line = line_of(traceback.extract_stack())
        self.given.setdefault(line, set()).add(output)
        return output != (line == self._changed)


def _raises_itself(error: Exception | None) -> bool:
    """Whether an error comes from a ``raise`` or an ``assert`` in the code of the model."""
    if error is None or error.__traceback__ is None:
        return False
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    raised = last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raised and bool(line_of(traceback.extract_tb(last)))
